//! The overlap chain against its plain twin and against direct SGD, and what it must keep.

use headflow_model::random::{Purpose, Stream, normal_quantile};
use headflow_model::{
    Activation, Aggregation, Attention, Bias, OrderParameters, Quantity, Shape, Task, Theta, Unwatched, largest_size,
    lower_factor,
};
use headflow_sims::ensemble::{Ensemble, Options, resume, simulate};
use headflow_sims::overlap_chain::Chain;
use headflow_sims::sgd::{Engine, Sgd, Start};
use nalgebra::{DMatrix, DVector};
use rayon::prelude::*;

const HEADS: usize = 3;

fn task(length: usize) -> Task {
    Task::new(length, Theta::Gaussian { mean: vec![1.0, 0.0], sd: Some(vec![0.5, 1.5]), cov: None }).unwrap()
}

fn sgd(attention: Attention, length: usize, dimension: usize, batch: usize) -> Sgd {
    Sgd { task: task(length), attention, dimension, gamma: 1.3, batch, seed: 5, engine: Engine::Overlap }
}

fn start() -> OrderParameters {
    let m = DMatrix::from_row_slice(HEADS, 2, &[0.4, 0.1, -0.3, 0.4, 0.2, -0.5]);
    let c = DMatrix::from_row_slice(HEADS, HEADS, &[0.5, 0.0, 0.0, 0.1, 0.6, 0.0, -0.2, 0.1, 0.4]);
    let r = &m * m.transpose() + &c * c.transpose();
    OrderParameters::new(m, r, vec![0.2, -0.1, 0.0]).unwrap()
}

/// The defaults, and every activation with the other bias rules.
fn attentions() -> Vec<Attention> {
    let mut all: Vec<Attention> = Activation::ALL.into_iter().map(Attention::from).collect();
    for activation in Activation::ALL {
        let aggregation = if activation == Activation::Softmax { Aggregation::Sum } else { Aggregation::Mean };
        all.push(Attention { activation, bias: Bias::HalfNorm, aggregation });
    }
    for activation in [Activation::Softmax1, Activation::BayesSoftmax] {
        all.push(Attention { activation, bias: Bias::None, aggregation: Aggregation::Sum });
    }
    all
}

/// Mean, variance, and the variances of both over samples.
fn moments(values: &[f64]) -> [f64; 4] {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let central = |k: i32| values.iter().map(|v| (v - mean).powi(k)).sum::<f64>() / n;
    let (second, fourth) = (central(2), central(4));
    [mean, second, second / n, (fourth - second * second) / n]
}

/// Many looks at one law, and the most improbable of them: it is held to a level for their number, so that a right law
/// fails a whole test as rarely as a single look of 4 standard errors (`6e-5`, Bonferroni), and a distribution with the
/// probability 1e-3.
#[derive(Default)]
struct Looks {
    deviations: usize,
    worst: (f64, String),
    distributions: usize,
    rarest: Option<(f64, String)>,
}

impl Looks {
    /// Two samples should have the same mean and variance.
    fn same_law(&mut self, name: &str, a: &[f64], b: &[f64]) {
        let (a, b) = (moments(a), moments(b));
        for (what, k) in [("mean", 0), ("variance", 1)] {
            let (difference, error) = ((a[k] - b[k]).abs(), (a[k + 2] + b[k + 2]).sqrt());
            self.deviations += 1;
            // Numbers that do not vary differ by rounding. NaN is no agreement.
            let deviation = if difference <= 1e-12 { 0.0 } else { difference / error };
            if !(deviation <= self.worst.0) {
                self.worst = (deviation, format!("{name}: {what} {} against {}", a[k], b[k]));
                assert!(deviation.is_finite(), "{}", self.worst.1);
            }
        }
    }

    /// Two samples should have the same distribution.
    fn same_distribution(&mut self, name: &str, a: &[f64], b: &[f64]) {
        let probability = kolmogorov_smirnov(a, b);
        self.distributions += 1;
        if !self.rarest.as_ref().is_some_and(|rarest| rarest.0 <= probability) {
            self.rarest = Some((probability, name.into()));
        }
    }

    fn check(self) {
        let Self { deviations, worst: (deviation, what), distributions, rarest } = self;
        assert!(deviations > 0);
        // P(z > 4), shared among the looks.
        let limit = -normal_quantile(3.167_124e-5 / deviations as f64);
        println!("{deviations} looks, the largest of {deviation:.2} standard errors, the limit {limit:.2}: {what}");
        assert!(
            deviation <= limit,
            "{what}, {deviation:.2} standard errors, the largest of {deviations}: above {limit:.2}"
        );
        if let Some((probability, what)) = rarest {
            let limit = 1e-3 / distributions as f64;
            assert!(probability > limit, "{what}: Kolmogorov-Smirnov probability {probability:.1e} of {distributions}");
        }
    }
}

/// Probability that two samples of one law are at least as far apart (Kolmogorov-Smirnov,
/// asymptotic, with Stephens' correction for finite samples).
fn kolmogorov_smirnov(a: &[f64], b: &[f64]) -> f64 {
    let (mut a, mut b) = (a.to_vec(), b.to_vec());
    a.sort_by(f64::total_cmp);
    b.sort_by(f64::total_cmp);
    let (mut i, mut j, mut distance) = (0, 0, 0.0f64);
    while i < a.len() && j < b.len() {
        let x = a[i].min(b[j]);
        while i < a.len() && a[i] <= x {
            i += 1;
        }
        while j < b.len() && b[j] <= x {
            j += 1;
        }
        distance = distance.max((i as f64 / a.len() as f64 - j as f64 / b.len() as f64).abs());
    }
    let n = ((a.len() * b.len()) as f64 / (a.len() + b.len()) as f64).sqrt();
    let lambda = (n + 0.12 + 0.11 / n) * distance;
    let terms = (1..100).map(|k| {
        let k = f64::from(k);
        2.0 * if k as i32 % 2 == 1 { 1.0 } else { -1.0 } * (-2.0 * k * k * lambda * lambda).exp()
    });
    terms.sum::<f64>().clamp(0.0, 1.0)
}

/// The plain twin (`theory/README.md` section 12): `W` drawn in full, `L x L`, by Bartlett, and the
/// update of `m` and `r` as it is written there.
struct Twin {
    sgd: Sgd,
    m: DMatrix<f64>,
    r: DMatrix<f64>,
    b: Vec<f64>,
}

impl Twin {
    fn advance(&mut self, normals: &mut dyn FnMut() -> f64, theta: &[f64]) {
        let (heads, features) = self.m.shape();
        let (length, dimension) = (self.sgd.task.length(), self.sgd.dimension as f64);
        let mut x = DMatrix::from_fn(features, length, |_, _| normals());
        for f in 0..features {
            x[(f, 0)] += theta[f];
        }
        let c = DMatrix::from_fn(heads, length, |_, _| normals());
        let root = lower_factor(&(&self.r - &self.m * self.m.transpose()), 1e-12).unwrap();
        let chi = &self.m * &x + root * &c;
        let mut bartlett = DMatrix::zeros(length, length);
        for l in 0..length {
            // A sum of squares: nothing to get wrong.
            let freedom = self.sgd.dimension - features - heads - l;
            bartlett[(l, l)] = (0..freedom).map(|_| normals().powi(2)).sum::<f64>().sqrt();
            for k in 0..l {
                bartlett[(l, k)] = normals();
            }
        }
        let gram = (x.transpose() * &x + c.transpose() * &c + &bartlett * bartlett.transpose()) / dimension;
        let b: Vec<f64> = match self.sgd.attention.bias {
            Bias::None => vec![0.0; heads],
            Bias::HalfNorm => (0..heads).map(|h| -0.5 * self.r[(h, h)]).collect(),
            Bias::Trained => self.b.clone(),
        };
        let scores: Vec<f64> = (0..heads * length).map(|i| chi[(i / length, i % length)] + b[i / length]).collect();
        let (weights, a) = self.sgd.attention.forward(heads, length, &scores).unwrap();
        let mut d = DVector::from_vec(a);
        d[0] -= 1.0;
        let q = &gram * &d * 2.0;
        let g = self.sgd.attention.backward(heads, length, &weights, q.as_slice()).unwrap();
        let g = DMatrix::from_row_slice(heads, length, &g);
        let eta = self.sgd.gamma / dimension;
        let gb: Vec<f64> = (0..heads).map(|h| g.row(h).sum()).collect();
        let scale = DMatrix::from_fn(heads, heads, |h, k| match (h == k, self.sgd.attention.bias) {
            (true, Bias::HalfNorm) => 1.0 + eta * gb[h],
            (true, _) => 1.0,
            _ => 0.0,
        });
        let cross = &scale * &chi * g.transpose();
        let r = &scale * &self.r * &scale - (&cross + cross.transpose()) * eta
            + &g * &gram * g.transpose() * (eta * eta * dimension);
        self.m = &scale * &self.m - &g * x.transpose() * eta;
        self.r = (&r + r.transpose()) * 0.5;
        if self.sgd.attention.bias == Bias::Trained {
            self.b.iter_mut().zip(gb).for_each(|(b, gb)| *b -= eta * gb);
        }
    }

    /// `m`, `r`, `b` after `steps` steps, as one list.
    fn run(sgd: &Sgd, steps: u64, replica: u32) -> Vec<f64> {
        let point = start();
        let b = if sgd.attention.bias == Bias::Trained { point.b().to_vec() } else { vec![0.0; HEADS] };
        let mut twin = Self { sgd: sgd.clone(), m: point.m().clone(), r: point.r().clone(), b };
        let stream = Stream::new(977, Purpose::Test, replica);
        for step in 0..steps {
            let mut buffer = vec![0.0f32; 4096];
            stream.normals(step, 0, 0, &mut buffer);
            let mut values = buffer.into_iter();
            let mut uniforms = vec![0.0; sgd.task.sampler().uniforms()];
            stream.uniforms(step, 1, &mut uniforms);
            let mut theta = vec![0.0; 2];
            sgd.task.sampler().sample(&uniforms, &mut theta);
            twin.advance(&mut || f64::from(values.next().unwrap()), &theta);
        }
        twin.m.iter().chain(twin.r.iter()).chain(&twin.b).copied().collect()
    }
}

/// Twelve steps at dimensions where every term of the update matters, the smallest one included:
/// means and variances of `m`, `r`, `b` and of products of neighbours, to a level for their number ([`Looks`]).
#[test]
fn the_chain_has_the_law_of_its_plain_twin() {
    const REPLICAS: u32 = 6000;
    const STEPS: u64 = 12;
    let mut looks = Looks::default();
    for attention in attentions() {
        for (length, dimension) in [(4, 4 + HEADS + 2), (2, 2 + HEADS + 2), (9, 20)] {
            let sgd = sgd(attention, length, dimension, 1);
            let plain: Vec<Vec<f64>> = (0..REPLICAS).into_par_iter().map(|k| Twin::run(&sgd, STEPS, k)).collect();
            let fast: Vec<Vec<f64>> = (0..REPLICAS)
                .into_par_iter()
                .map(|k| {
                    let mut chain = Chain::new(&sgd, &Start::Given(start()), k).unwrap();
                    (0..STEPS).for_each(|_| chain.advance().unwrap());
                    let (m, r, _) = chain.overlaps();
                    m.iter().chain(r.iter()).chain(&chain.state().b).copied().collect()
                })
                .collect();
            for i in 0..plain[0].len() {
                let name = format!("{attention:?} L={length} D={dimension} number {i}");
                let pick = |all: &[Vec<f64>]| -> Vec<f64> { all.iter().map(|v| v[i]).collect() };
                looks.same_law(&name, &pick(&plain), &pick(&fast));
                let next = (i + 1) % plain[0].len();
                let pick = |all: &[Vec<f64>]| -> Vec<f64> { all.iter().map(|v| v[i] * v[next]).collect() };
                looks.same_law(&format!("{name} times its neighbour"), &pick(&plain), &pick(&fast));
            }
        }
    }
    looks.check();
}

fn ensemble(sgd: &Sgd, engine: Engine, times: &[f64], replicas: u32) -> Ensemble {
    let sgd = Sgd { engine, seed: if engine == Engine::Direct { 31 } else { 32 }, ..sgd.clone() };
    let options = Options { times: times.to_vec(), replicas, test_samples: 64 };
    simulate(&sgd, &Start::Given(start()), &options, &Unwatched).unwrap()
}

/// Means and variances of every order parameter and the loss at five times, and a Kolmogorov-Smirnov test on one overlap.
fn chain_against_direct(sgd: &Sgd, replicas: u32, last: f64, looks: &mut Looks) {
    let times: Vec<f64> = (1..=5).map(|k| last * f64::from(k) / 5.0).collect();
    let direct = ensemble(sgd, Engine::Direct, &times, replicas);
    let chain = ensemble(sgd, Engine::Overlap, &times, replicas);
    let shape = Shape { heads: HEADS, features: 2 };
    for t in 0..times.len() {
        for (i, quantity) in shape.quantities().enumerate() {
            let pick = |e: &Ensemble| -> Vec<f64> { e.runs.iter().map(|run| run.trajectory.rows[t][i]).collect() };
            let name = format!("{:?} D={} B={} {quantity:?} at {}", sgd.attention, sgd.dimension, sgd.batch, times[t]);
            looks.same_law(&name, &pick(&direct), &pick(&chain));
            if quantity == (Quantity::Overlap { head: 0, other: 1 }) {
                looks.same_distribution(&name, &pick(&direct), &pick(&chain));
            }
        }
    }
}

#[test]
fn the_chain_has_the_law_of_direct_sgd() {
    let mut looks = Looks::default();
    for attention in attentions() {
        for (dimension, replicas, last) in [(30, 2000, 10.0), (100, 800, 10.0), (1000, 80, 5.0)] {
            chain_against_direct(&sgd(attention, 4, dimension, 1), replicas, last, &mut looks);
        }
    }
    looks.check();
}

/// In a batch the directions that earlier samples bring in are shared; at `D = F + H + L` fewer
/// directions are left than heads.
#[test]
fn batches_have_the_law_of_direct_sgd() {
    let mut looks = Looks::default();
    for attention in attentions() {
        for (length, dimension, batch) in [(2, 2 + HEADS + 2, 4), (4, 4 + HEADS + 2, 3), (4, 60, 7)] {
            chain_against_direct(&sgd(attention, length, dimension, batch), 800, 6.0, &mut looks);
        }
    }
    looks.check();
}

/// Random keys in `D` dimensions have the same overlaps in law.
#[test]
fn random_starts_have_the_law_of_random_keys() {
    let start = Start::Random { heads: HEADS, scale: 1.4, b: vec![0.0; HEADS] };
    let mut looks = Looks::default();
    for dimension in [4 + HEADS + 2, 50] {
        let sgd = sgd(Activation::Softmax.into(), 4, dimension, 1);
        let of = |engine: Engine| -> Vec<Vec<f64>> {
            let sgd = Sgd { engine, ..sgd.clone() };
            (0..4000)
                .map(|k| {
                    let (m, r, _) = headflow_sims::ensemble::Replica::new(&sgd, &start, k).unwrap().overlaps();
                    m.iter().chain(r.iter()).copied().collect()
                })
                .collect()
        };
        let (direct, chain) = (of(Engine::Direct), of(Engine::Overlap));
        for i in 0..direct[0].len() {
            let pick = |all: &[Vec<f64>]| -> Vec<f64> { all.iter().map(|v| v[i]).collect() };
            looks.same_law(&format!("D={dimension} number {i}"), &pick(&direct), &pick(&chain));
        }
    }
    looks.check();
}

/// A run that is put down and taken up again, twice and at odd steps, has the bits of one that was
/// not; its checkpoint survives JSON.
#[test]
fn a_resumed_run_has_the_bits_of_an_unbroken_one() {
    for (attention, batch) in attentions().into_iter().zip([1, 2, 1, 3, 1, 1, 2, 1]) {
        let sgd = sgd(attention, 5, 1000, batch);
        let mut whole = Chain::new(&sgd, &Start::Given(start()), 7).unwrap();
        let mut broken = whole.clone();
        for steps in [1, 37, 500] {
            for _ in 0..steps {
                whole.advance().unwrap();
                broken.advance().unwrap();
            }
            let text = serde_json::to_string(&broken.state()).unwrap();
            broken = Chain::at(&sgd, HEADS, 7, &serde_json::from_str(&text).unwrap()).unwrap();
        }
        assert_eq!(whole.state(), broken.state());
    }
}

/// The same for an ensemble, from checkpoints that the run offers on its way.
#[test]
fn a_resumed_ensemble_has_the_bits_of_an_unbroken_one() {
    let sgd = sgd(Activation::Softmax1.into(), 4, 100, 1);
    let (start, options) =
        (Start::Given(start()), Options { times: vec![0.0, 1.0, 2.5, 4.0], replicas: 3, test_samples: 16 });
    let mut kept = Vec::new();
    let whole = resume(
        &sgd,
        &start,
        &options,
        None,
        &mut |make| {
            kept.push(make());
            Ok(())
        },
        &Unwatched,
    )
    .unwrap();
    assert!(kept.len() >= 4 && whole.unfinished.is_none());
    for checkpoint in &kept {
        let again = resume(&sgd, &start, &options, Some(checkpoint), &mut |_| Ok(()), &Unwatched).unwrap();
        assert_eq!(again.runs, whole.runs);
    }
    let refused = |options: &Options, sgd: &Sgd| {
        resume(sgd, &start, options, kept.last(), &mut |_| Ok(()), &Unwatched).unwrap_err().to_string()
    };
    assert!(refused(&Options { replicas: 2, ..options.clone() }, &sgd).contains("replicas"));
    assert!(refused(&Options { times: vec![0.0, 9.0], ..options.clone() }, &sgd).contains("records"));
    assert!(refused(&options, &Sgd { engine: Engine::Direct, ..sgd.clone() }).contains("overlap"));
}

/// The law of the starts where it is hardest to draw: three degrees of freedom, by the moments of
/// chi-square (within 4 standard errors) and the distribution (Kolmogorov-Smirnov).
#[test]
fn small_degrees_of_freedom_are_drawn_exactly() {
    let task = Task::new(2, Theta::Flip { nu: vec![1.0] }).unwrap();
    let attention = Activation::Softmax.into();
    let sgd = Sgd { task, attention, dimension: 4, gamma: 1.0, batch: 1, seed: 3, engine: Engine::Overlap };
    let start = Start::Random { heads: 1, scale: 2.0, b: vec![0.0] };
    let of = |engine: Engine| -> Vec<f64> {
        let sgd = Sgd { engine, seed: if engine == Engine::Direct { 8 } else { 9 }, ..sgd.clone() };
        let replicas = (0..60_000u32).into_par_iter().map(|k| {
            let (m, r, _) = headflow_sims::ensemble::Replica::new(&sgd, &start, k).unwrap().overlaps();
            r[(0, 0)] - m[(0, 0)] * m[(0, 0)]
        });
        replicas.collect()
    };
    let (direct, chain) = (of(Engine::Direct), of(Engine::Overlap));
    // scale^2 / D = 1: chi-square with D - F = 3 degrees of freedom, third central moment 8 k.
    for (power, exact) in [(1, 3.0), (2, 6.0), (3, 24.0)] {
        let values: Vec<f64> = chain.iter().map(|v| if power == 1 { *v } else { (v - 3.0).powi(power) }).collect();
        let [mean, _, variance, _] = moments(&values);
        assert!((mean - exact).abs() < 4.0 * variance.sqrt(), "moment {power}: {mean} +- {}", variance.sqrt());
    }
    let probability = kolmogorov_smirnov(&direct, &chain);
    assert!(probability > 1e-3, "Kolmogorov-Smirnov probability {probability:.1e}");
}

/// Heads that start alike draw the same steps, so all overlaps stay equal to rounding (for a while: a
/// difference of rounding grows like any other), at singular
/// `r - m m^T`; and long runs stay possible.
#[test]
fn overlaps_stay_overlaps() {
    let zero = OrderParameters::new(DMatrix::zeros(HEADS, 2), DMatrix::zeros(HEADS, HEADS), vec![0.0; HEADS]).unwrap();
    for attention in attentions() {
        let sgd = sgd(attention, 3, 400, 1);
        let mut alike = Chain::new(&sgd, &Start::Given(zero.clone()), 0).unwrap();
        (0..2000).for_each(|_| alike.advance().unwrap());
        let (m, r, _) = alike.overlaps();
        for h in 0..HEADS {
            for k in 0..HEADS {
                assert!((r[(h, k)] - r[(0, 0)]).abs() < 1e-12 * r[(0, 0)], "{attention:?}: {r}");
            }
            assert!(largest_size((m.row(h) - m.row(0)).iter()) < 1e-12, "{attention:?}: {m}");
        }
        let mut long = Chain::new(&sgd, &Start::Given(start()), 0).unwrap();
        (0..400_000).for_each(|_| long.advance().unwrap());
        let (m, r, b) = long.overlaps();
        OrderParameters::new(m, r, b).unwrap();
    }
}

#[test]
fn impossible_chains_are_refused() {
    let good = sgd(Activation::Softmax.into(), 4, 30, 1);
    let given = Start::Given(start());
    let refused = |sgd: Sgd| Chain::new(&sgd, &given, 0).unwrap_err().to_string();
    let small = refused(Sgd { dimension: 4 + HEADS + 1, ..good.clone() });
    assert!(small.contains("F + H + L = 9") && !small.contains('\n'), "{small}");
    assert!(Chain::new(&Sgd { dimension: 4 + HEADS + 2, ..good.clone() }, &given, 0).is_ok());
    assert!(refused(Sgd { dimension: usize::MAX, ..good.clone() }).contains("limit"));
    assert!(refused(Sgd { batch: 0, ..good.clone() }).contains("batch"));
    assert!(refused(Sgd { gamma: 0.0, ..good.clone() }).contains("gamma"));
    let mut state = Chain::new(&good, &given, 0).unwrap().state();
    assert!(Chain::at(&good, 2, 0, &state).is_err());
    state.m[0] = f64::NAN;
    assert!(Chain::at(&good, HEADS, 0, &state).is_err());
}

/// A learning rate far too large ends as a divergence, not as NaNs.
#[test]
fn a_diverging_chain_says_so() {
    let mut sgd = sgd(Attention { bias: Bias::HalfNorm, ..Activation::Softmax1.into() }, 4, 30, 1);
    sgd.gamma = 1e6;
    let mut chain = Chain::new(&sgd, &Start::Given(start()), 0).unwrap();
    let diverged = (0..1000).find_map(|_| chain.advance().err()).expect("this diverges");
    assert_eq!(diverged.step, chain.steps());
    let (m, r, _) = chain.overlaps();
    assert!(m.iter().chain(r.iter()).all(|v| v.is_finite()));
}
