//! The loss after heads are removed (`theory/README.md` section 18).
//!
//! A set `S` of heads goes after training, the others stay as they are:
//!
//! ```text
//! E_S = E(m, r, b restricted to the heads outside S),
//! a_l = g sum_{h not in S} A_hl,   g = 1 / (H - |S|) (mean) or 1 (sum)
//! ```
//!
//! so that a pruned system is a smaller system of the same attention: `mean` divides by the heads that
//! are left, bayes-softmax normalises over them, `sum` just lacks the others.
//!
//! For each number `n` of removed heads the losses of all `binomial(H, n)` sets are taken, or of that
//! many distinct random ones: their mean, spread, best and worst. Sagitova, Duranthon and Zdeborova,
//! arXiv 2603.03993, ask this of trained heads.

use std::collections::BTreeSet;

use headflow_model::random::{Purpose, Stream};
use headflow_model::{Cost, Error, OrderParameters, Watch};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

/// The losses with one number of heads removed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Heads removed, `n`.
    pub removed: usize,
    /// Sets of heads whose loss was taken.
    pub subsets: usize,
    /// Whether these are all sets of that size.
    pub exhaustive: bool,
    /// Mean loss over the sets.
    pub mean: f64,
    /// Standard deviation of the losses about their mean (divided by their number; 0 for one set).
    pub standard_deviation: f64,
    /// The lowest loss.
    pub best: f64,
    /// The highest loss.
    pub worst: f64,
    /// The heads that are left at the lowest loss, increasing.
    pub best_kept: Vec<usize>,
    /// The heads that are left at the highest loss, increasing.
    pub worst_kept: Vec<usize>,
}

/// The losses with 0, 1, ... heads removed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Pruning {
    /// One row for each number of removed heads, from 0 on.
    pub rows: Vec<Row>,
}

impl Pruning {
    /// The loss with all heads.
    pub fn unpruned(&self) -> f64 {
        self.rows.first().map_or(f64::NAN, |row| row.mean)
    }

    /// How many heads can go when one may choose which: the largest `n` such that for 1, 2, ..., `n` removed
    /// heads the best set costs at most a fraction `tolerance`, `best <= (1 + tolerance) E`, with `E` the loss
    /// with all heads. Sets whose removal lowers the loss count as free.
    pub fn prunable(&self, tolerance: f64) -> usize {
        self.count_while(tolerance, |row| row.best)
    }

    /// How many heads can go together when one may choose which: the largest `n` whose best set costs at most a
    /// fraction `tolerance`, whatever fewer cost. Under `mean` this may be more than [`Pruning::prunable`]: of two
    /// heads for each of several patterns, one of each is free, but one alone tips the balance.
    pub fn prunable_together(&self, tolerance: f64) -> usize {
        let limit = (1.0 + tolerance) * self.unpruned();
        self.rows.iter().rev().find(|row| row.best <= limit).map_or(0, |row| row.removed)
    }

    /// How many heads can go when chance chooses: as [`Pruning::prunable`], with the mean over the sets.
    pub fn prunable_at_random(&self, tolerance: f64) -> usize {
        self.count_while(tolerance, |row| row.mean)
    }

    fn count_while(&self, tolerance: f64, loss: impl Fn(&Row) -> f64) -> usize {
        let limit = (1.0 + tolerance) * self.unpruned();
        self.rows.iter().skip(1).take_while(|row| loss(row) <= limit).count()
    }
}

/// The losses of `point` with 0 to `most_removed` heads removed.
///
/// For each number at most `most_subsets` sets are taken: all of them where there are no more, else distinct
/// random ones, the same for the same `seed`. `loss` gives the loss of a point with any number of heads; sets
/// are taken in parallel, and the answer does not depend on the number of threads. `watch` advances by one for
/// each set ([`sets`] says how many there will be).
///
/// # Errors
/// When `most_removed` leaves no head, `most_subsets` is zero, `loss` fails or is not finite, or the work is
/// interrupted.
pub fn prune(
    point: &OrderParameters,
    most_subsets: usize,
    most_removed: usize,
    seed: u64,
    loss: &(dyn Fn(&OrderParameters) -> Result<f64, Error> + Sync),
    watch: &dyn Watch,
) -> Result<Pruning, Error> {
    prune_sets(point.heads(), most_subsets, most_removed, seed, &|kept| loss(&point.kept(kept)?), watch)
}

/// [`prune`], with the loss as a function of the heads that are left: where losses of many sets have work in common.
///
/// # Errors
/// As [`prune`].
pub fn prune_sets(
    heads: usize,
    most_subsets: usize,
    most_removed: usize,
    seed: u64,
    loss: &(dyn Fn(&[usize]) -> Result<f64, Error> + Sync),
    watch: &dyn Watch,
) -> Result<Pruning, Error> {
    check(heads, most_subsets, most_removed)?;
    let rows = (0..=most_removed).map(|removed| {
        let (kept, exhaustive) = kept_sets(heads, removed, most_subsets, seed);
        let losses: Vec<f64> = kept
            .par_iter()
            .map(|kept| {
                if watch.interrupted() {
                    return Err(Error::interrupted("prune"));
                }
                let value = loss(kept)?;
                watch.advance(1);
                // Then the loss may be none.
                if watch.interrupted() {
                    return Err(Error::interrupted("prune"));
                }
                if value.is_finite() {
                    Ok(value)
                } else {
                    Err(Error::invalid("prune", format!("the loss with heads {kept:?} alone is {value}")))
                }
            })
            .collect::<Result<_, Error>>()?;
        Ok(row(removed, exhaustive, &kept, &losses))
    });
    Ok(Pruning { rows: rows.collect::<Result<_, Error>>()? })
}

/// How many sets [`prune`] takes: the work that it reports.
pub fn sets(heads: usize, most_subsets: usize, most_removed: usize) -> u64 {
    (0..=most_removed.min(heads)).map(|n| binomial(heads, n, most_subsets).unwrap_or(most_subsets) as u64).sum()
}

fn check(heads: usize, most_subsets: usize, most_removed: usize) -> Result<(), Error> {
    if most_removed >= heads {
        return Err(Error::invalid(
            "most_removed",
            format!("of {heads} heads at most {} can be removed, got {most_removed}", heads - 1),
        ));
    }
    if most_subsets == 0 {
        return Err(Error::invalid("subsets", "must be at least 1"));
    }
    cost(heads, most_subsets, most_removed).check_watched("subsets", "take fewer subsets, or remove fewer heads")
}

/// What it takes to draw the sets: all rows' operations, and the bytes of the largest row.
fn cost(heads: usize, most_subsets: usize, most_removed: usize) -> Cost {
    // A set, its place in a tree of sets, and what is drawn for it.
    let of_set = 3.0 * (size_of::<usize>() * heads + 64) as f64;
    (0..=most_removed).fold(Cost::default(), |sum, removed| {
        let all = log_binomial(heads, removed);
        let most = (most_subsets as f64).min(all.exp());
        // Of N sets, N (ln N - ln (N - n)) draws find n different ones on average.
        let missing = (-(most / all.exp())).ln_1p().max(-all - 1.0);
        let draws = if most < all.exp() { (-missing * all.exp()).max(most) } else { most };
        let draws = if draws.is_finite() { draws } else { most };
        Cost { operations: sum.operations + draws * OF_DRAW * heads as f64, bytes: sum.bytes.max(most * of_set) }
    })
}

/// Operations of a head in a set that is drawn.
const OF_DRAW: f64 = 50.0;

/// `ln binomial(n, k)`.
fn log_binomial(n: usize, k: usize) -> f64 {
    (0..k.min(n - k)).map(|i| ((n - i) as f64 / (i + 1) as f64).ln()).sum()
}

fn row(removed: usize, exhaustive: bool, kept: &[Vec<usize>], losses: &[f64]) -> Row {
    let count = losses.len() as f64;
    let mean = losses.iter().sum::<f64>() / count;
    let variance = losses.iter().map(|l| (l - mean).powi(2)).sum::<f64>() / count;
    // The first of equal ones, in both cases.
    let (mut best, mut worst) = (0, 0);
    for (i, &l) in losses.iter().enumerate() {
        best = if l < losses[best] { i } else { best };
        worst = if l > losses[worst] { i } else { worst };
    }
    Row {
        removed,
        subsets: losses.len(),
        exhaustive,
        mean,
        standard_deviation: variance.sqrt(),
        best: losses[best],
        worst: losses[worst],
        best_kept: kept[best].clone(),
        worst_kept: kept[worst].clone(),
    }
}

/// `binomial(n, k)`, when it is at most `limit`.
fn binomial(n: usize, k: usize, limit: usize) -> Option<usize> {
    let mut value: u128 = 1;
    // From here on the values grow: the first above the limit settles it, long before an overflow.
    for i in 0..k.min(n - k) {
        value = value * (n - i) as u128 / (i + 1) as u128;
        if value > limit as u128 {
            return None;
        }
    }
    (value <= limit as u128).then_some(value as usize)
}

/// The sets of heads that are kept, each increasing, and whether they are all there are.
fn kept_sets(heads: usize, removed: usize, most: usize, seed: u64) -> (Vec<Vec<usize>>, bool) {
    let size = heads - removed;
    if binomial(heads, removed, most).is_some() {
        return (combinations(heads, size), true);
    }
    // There are more sets than are asked for: this ends.
    let stream = Stream::new(seed, Purpose::Pruning, 0);
    let mut found = BTreeSet::new();
    let mut uniforms = vec![0.0; size];
    for attempt in 0u32.. {
        stream.uniforms(removed as u64, attempt, &mut uniforms);
        let mut order: Vec<usize> = (0..heads).collect();
        for (i, u) in uniforms.iter().enumerate() {
            let left = heads - i;
            order.swap(i, i + ((u * left as f64) as usize).min(left - 1));
        }
        order.truncate(size);
        order.sort_unstable();
        found.insert(order);
        if found.len() == most {
            break;
        }
    }
    (found.into_iter().collect(), false)
}

/// All increasing lists of `size` numbers below `n`, in lexicographic order.
fn combinations(n: usize, size: usize) -> Vec<Vec<usize>> {
    let mut current: Vec<usize> = (0..size).collect();
    let mut all = vec![current.clone()];
    while let Some(i) = (0..size).rev().find(|&i| current[i] < n - size + i) {
        current[i] += 1;
        for j in i + 1..size {
            current[j] = current[j - 1] + 1;
        }
        all.push(current.clone());
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moments::{Coordinates, Evaluator};
    use crate::quasi_monte_carlo::QuasiMonteCarlo;
    use headflow_model::{Activation, Aggregation, Attention, Bias, Task, Theta, Unwatched, biases};
    use nalgebra::DMatrix;

    fn point(m: &[&[f64]], outside: f64, b: &[f64]) -> OrderParameters {
        let m = DMatrix::from_fn(m.len(), m[0].len(), |h, f| m[h][f]);
        let r = &m * m.transpose() + DMatrix::identity(m.nrows(), m.nrows()) * outside;
        OrderParameters::new(m, r, b.to_vec()).unwrap()
    }

    fn some_point() -> OrderParameters {
        point(&[&[1.5, 0.2], &[-1.2, 0.4], &[0.3, 1.1], &[0.1, -0.9], &[0.7, 0.7]], 0.2, &[0.1, -0.3, 0.2, -0.5, 0.0])
    }

    fn task() -> Task {
        Task::new(4, Theta::Flip { nu: vec![2.0, 1.5] }).unwrap()
    }

    /// The loss of keys without a part outside the spikes, on fixed samples that do not depend on the number
    /// of heads: what should be equal is equal to rounding.
    fn on_fixed_samples(attention: Attention) -> impl Fn(&OrderParameters) -> Result<f64, Error> + Sync {
        let (length, features, samples) = (4, 2, 200);
        let mut noise = vec![0.0f32; samples * length * features];
        Stream::new(5, Purpose::Test, 0).normals(0, 0, 0, &mut noise);
        move |at: &OrderParameters| {
            let heads = at.heads();
            let b = biases(attention.bias, at.r(), at.b());
            let mut sum = 0.0;
            for x in noise.chunks_exact(length * features) {
                let scores: Vec<f64> = (0..heads * length)
                    .map(|i| {
                        let (h, l) = (i / length, i % length);
                        let x = |f| f64::from(x[l * features + f]) + if l == 0 { [2.0, 1.5][f] } else { 0.0 };
                        b[h] + (0..features).map(|f| at.m()[(h, f)] * x(f)).sum::<f64>()
                    })
                    .collect();
                let (_, a) = attention.forward(heads, length, &scores)?;
                sum += 1.0 - 2.0 * a[0] + a.iter().map(|a| a * a).sum::<f64>();
            }
            Ok(sum / samples as f64)
        }
    }

    fn all(point: &OrderParameters, loss: &(dyn Fn(&OrderParameters) -> Result<f64, Error> + Sync)) -> Pruning {
        prune(point, 256, point.heads() - 1, 1, loss, &Unwatched).unwrap()
    }

    /// The slow twin: every set of heads from a bit mask, its restricted point built by hand.
    #[test]
    fn rows_are_what_enumeration_gives() {
        let at = some_point();
        for activation in Activation::ALL {
            let attention = Attention { bias: Bias::Trained, ..Attention::from(activation) };
            let sets: Vec<_> =
                (1..=5).map(|heads| QuasiMonteCarlo::new(&task(), heads, attention, 256, 1, 0).unwrap()).collect();
            let loss = |at: &OrderParameters| Ok(sets[at.heads() - 1].loss(&Coordinates::of(at, &attention)).value());
            let found = all(&at, &loss);
            assert_eq!(found.rows.len(), 5);
            for row in &found.rows {
                let mut losses = Vec::new();
                for mask in 1u32..32 {
                    let kept: Vec<usize> = (0..5).filter(|h| mask >> h & 1 == 1).collect();
                    if kept.len() != 5 - row.removed {
                        continue;
                    }
                    let m = DMatrix::from_fn(kept.len(), 2, |i, f| at.m()[(kept[i], f)]);
                    let r = DMatrix::from_fn(kept.len(), kept.len(), |i, j| at.r()[(kept[i], kept[j])]);
                    let b = kept.iter().map(|&h| at.b()[h]).collect();
                    losses.push((loss(&OrderParameters::new(m, r, b).unwrap()).unwrap(), kept));
                }
                let n = losses.len() as f64;
                let mean = losses.iter().map(|l| l.0).sum::<f64>() / n;
                let square = losses.iter().map(|l| l.0 * l.0).sum::<f64>() / n;
                losses.sort_by(|a, b| a.0.total_cmp(&b.0));
                let (best, worst) = (&losses[0], &losses[losses.len() - 1]);
                assert_eq!((row.subsets, row.exhaustive), (losses.len(), true));
                assert_eq!((row.best, &row.best_kept), (best.0, &best.1));
                assert_eq!((row.worst, &row.worst_kept), (worst.0, &worst.1));
                assert!((row.mean - mean).abs() < 1e-14);
                assert!((row.standard_deviation.powi(2) - (square - mean * mean)).abs() < 1e-14);
            }
            assert_eq!(found.rows.iter().map(|r| r.subsets).collect::<Vec<_>>(), [1, 5, 10, 10, 5]);
        }
    }

    /// Two pairs of equal heads under a mean: one of each pair can go and nothing changes.
    #[test]
    fn a_mean_does_not_miss_duplicates() {
        let loss = on_fixed_samples(Attention::from(Activation::Softmax));
        let pairs: [&[f64]; 4] = [&[1.5, 1.0], &[-1.5, 0.5], &[1.5, 1.0], &[-1.5, 0.5]];
        let found = all(&point(&pairs, 0.0, &[0.0; 4]), &loss);
        let two = &found.rows[2];
        let mixed = loss(&point(&pairs[..2], 0.0, &[0.0; 2])).unwrap();
        assert!((mixed - found.unpruned()).abs() < 1e-13, "the mean is over the heads that are left");
        let alone = loss(&point(&pairs[..1], 0.0, &[0.0])).unwrap();
        assert!((two.best - alone.min(mixed)).abs() < 1e-13);
        // Of the sets of two, four are mixed and two are a pair of equals.
        let other = loss(&point(&pairs[1..2], 0.0, &[0.0])).unwrap();
        assert!((two.mean - (4.0 * mixed + alone + other) / 6.0).abs() < 1e-13);
    }

    /// Under bayes-softmax two equal heads with biases lowered by ln 2 are one head.
    #[test]
    fn bayes_softmax_weighs_duplicates() {
        let loss = on_fixed_samples(Attention::from(Activation::BayesSoftmax));
        let (a, b): (&[f64], &[f64]) = (&[1.5, 1.0], &[-1.5, 0.5]);
        let half = std::f64::consts::LN_2;
        let single = loss(&point(&[a, b], 0.0, &[0.3, -0.2])).unwrap();
        let doubled = point(&[a, a, b, b], 0.0, &[0.3 - half, 0.3 - half, -0.2 - half, -0.2 - half]);
        let found = all(&doubled, &loss);
        assert!((found.unpruned() - single).abs() < 1e-13);
        // One of a pair gone: the other stands at half its weight.
        let lighter = [[0.3 - half, -0.2], [0.3, -0.2 - half]].map(|bias| loss(&point(&[a, b], 0.0, &bias)).unwrap());
        assert!(lighter.iter().all(|l| (l - single).abs() > 1e-6));
        let one = &found.rows[1];
        assert!((one.best - lighter[0].min(lighter[1])).abs() < 1e-13);
        assert!((one.worst - lighter[0].max(lighter[1])).abs() < 1e-13);
        assert!((one.mean - 0.5 * (lighter[0] + lighter[1])).abs() < 1e-13);
        // One of each pair gone: a common shift of all biases, which normalises away.
        let kept = doubled.kept(&[0, 2]).unwrap();
        assert!((loss(&kept).unwrap() - single).abs() < 1e-13);
    }

    #[test]
    fn an_off_head_costs_nothing() {
        let loss = on_fixed_samples(Attention::from(Activation::Softmax1));
        let at = point(&[&[1.5, 1.0], &[0.5, 0.2], &[-1.0, 1.5]], 0.0, &[-2.0, -40.0, -2.0]);
        let found = all(&at, &loss);
        let without = |kept: &[usize]| loss(&at.kept(kept).unwrap()).unwrap() - found.unpruned();
        assert!(without(&[0, 2]).abs() < 1e-14);
        assert!(without(&[0, 1]).abs() > 1e-3 && without(&[1, 2]).abs() > 1e-3);
        assert!(found.prunable(1e-9) >= 1);
    }

    /// What is left is divided by what is left, and a sum is not.
    #[test]
    fn the_gain_follows_the_heads_that_are_left() {
        let single: &[f64] = &[1.5, 1.0];
        for (aggregation, same) in [(Aggregation::Mean, true), (Aggregation::Sum, false)] {
            let attention = Attention { activation: Activation::Softmax, bias: Bias::None, aggregation };
            let loss = on_fixed_samples(attention);
            let found = all(&point(&[single, single, single], 0.0, &[0.0; 3]), &loss);
            let last = &found.rows[2];
            assert!((last.mean - loss(&point(&[single], 0.0, &[0.0])).unwrap()).abs() < 1e-14);
            assert_eq!((last.mean - found.unpruned()).abs() < 1e-13, same);
        }
    }

    #[test]
    fn sets_are_counted_as_binomials_say() {
        for heads in 1..=9 {
            for removed in 0..heads {
                let (kept, exhaustive) = kept_sets(heads, removed, 256, 1);
                let count: f64 = (0..removed).map(|i| (heads - i) as f64 / (i + 1) as f64).product();
                assert_eq!((kept.len(), exhaustive), (count.round() as usize, true));
                assert_eq!(binomial(heads, removed, 256), Some(kept.len()));
                assert_eq!(kept.iter().collect::<BTreeSet<_>>().len(), kept.len());
                assert!(kept.iter().all(|k| k.len() == heads - removed && k.is_sorted_by(|a, b| a < b)));
            }
        }
        assert_eq!(binomial(1024, 512, usize::MAX), None);
        assert_eq!(sets(9, 50, 8), 1 + 9 + 36 + 50 + 50 + 50 + 50 + 36 + 9);
    }

    /// Random sets are distinct, repeat with their seed, and favour no head (4 standard errors).
    #[test]
    fn random_sets_are_distinct_and_fair() {
        let (heads, removed, most) = (20, 6, 3000);
        let (kept, exhaustive) = kept_sets(heads, removed, most, 7);
        assert!(!exhaustive && kept.len() == most);
        assert_eq!(kept.iter().collect::<BTreeSet<_>>().len(), most);
        assert!(kept.iter().all(|k| k.len() == 14 && k.is_sorted_by(|a, b| a < b) && k[13] < heads));
        assert_eq!(kept, kept_sets(heads, removed, most, 7).0);
        assert_ne!(kept, kept_sets(heads, removed, most, 8).0);
        let p = 14.0 / 20.0;
        let error = (most as f64 * p * (1.0 - p)).sqrt();
        for head in 0..heads {
            let count = kept.iter().filter(|k| k.contains(&head)).count() as f64;
            assert!((count - most as f64 * p).abs() < 4.0 * error, "head {head}: {count}");
        }
        // Nearly all of them: chance has to find the last ones.
        assert_eq!(kept_sets(6, 3, 19, 1).0.len(), 19);
    }

    #[test]
    fn prunable_stops_at_the_first_costly_number() {
        let row = |removed, best, mean| Row {
            removed,
            subsets: 1,
            exhaustive: true,
            mean,
            standard_deviation: 0.0,
            best,
            worst: mean,
            best_kept: vec![],
            worst_kept: vec![],
        };
        let rows = vec![row(0, 1.0, 1.0), row(1, 0.9, 1.03), row(2, 1.02, 1.3), row(3, 1.2, 1.2), row(4, 0.8, 0.8)];
        let found = Pruning { rows };
        assert_eq!([0.0, 0.01, 0.02, 0.05, 0.2].map(|t| found.prunable(t)), [1, 1, 2, 2, 4]);
        assert_eq!([0.01, 0.3].map(|t| found.prunable_together(t)), [4, 4]);
        assert_eq!(Pruning { rows: found.rows[..4].to_vec() }.prunable_together(0.05), 2);
        assert_eq!([0.01, 0.05, 0.3].map(|t| found.prunable_at_random(t)), [0, 1, 4]);
    }

    #[test]
    fn threads_do_not_change_the_answer() {
        let loss = on_fixed_samples(Attention::from(Activation::Softmax));
        let with = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| prune(&some_point(), 7, 4, 3, &loss, &Unwatched).unwrap())
        };
        assert_eq!(with(1), with(3));
    }

    #[test]
    fn impossible_prunings_are_refused() {
        let loss = |_: &OrderParameters| Ok(1.0);
        let message =
            |subsets, removed| prune(&some_point(), subsets, removed, 1, &loss, &Unwatched).unwrap_err().to_string();
        assert_eq!(message(256, 5), "most_removed: of 5 heads at most 4 can be removed, got 5");
        assert!(message(0, 4).starts_with("subsets: "));
        // More sets than memory holds, known before any is drawn.
        let many = prune_sets(200, usize::MAX, 100, 1, &|_| Ok(1.0), &Unwatched).unwrap_err();
        assert!(matches!(many, Error::TooCostly { .. }) && many.to_string().starts_with("subsets: "), "{many}");
        let broken = |_: &OrderParameters| Ok(f64::NAN);
        assert!(prune(&some_point(), 9, 1, 1, &broken, &Unwatched).is_err());
        struct Stopped;
        impl Watch for Stopped {
            fn advance(&self, _: u64) {}
            fn interrupted(&self) -> bool {
                true
            }
        }
        assert!(prune(&some_point(), 9, 1, 1, &loss, &Stopped).is_err());
    }
}
