//! Linear stability of the flow: growth rates and what grows (`theory/README.md` sections 8, 11, 13).
//!
//! In the coordinates `k_h = m_h . k* + C_h . e` (and trained biases `b`), gradient flow is
//! `dy/dtau = -grad E(y)`. Around a point it moves by `d(dy)/dtau = J dy` with
//!
//! ```text
//! J = -Hessian of E in (m, C, b),   J v = rate v
//! ```
//!
//! `J` is symmetric: rates are real, modes orthogonal. It is formed by central differences of the
//! gradient, averaged over scrambles. Columns of `C` beyond its rank are directions that no key has
//! a part in: all of them have the same block of `J`, so one stands for all (none, where the keys
//! span `H` directions and `C` has no empty column left).
//!
//! A mode's weight on `sum_h dk_h = 0` says whether it separates heads: 1 is specialising, 0
//! symmetric. Modes of one rate are chosen to be as pure as they can be, in this weight and in
//! the direction that they move.
//!
//! With a learning rate (`noise = gamma / B`) the stationary points are those of the flow with its
//! noise term. `J` is still minus the Hessian there. About `m = 0` (with `E theta = 0`) it gives the rates of
//! perturbations of `m` exactly: there the noise term is of second order in them. Perturbations of
//! `C` and `b` change the noise term itself, an effect as large as their own rates:
//! [`Stability::along_features`] keeps what is exact. Where `m` is not 0, rates along the features miss
//! terms of order `gamma / B`.

use headflow_model::{Activation, Bias, Error, OrderParameters, Watch, biases, larger, largest, largest_size};
use nalgebra::{DMatrix, DVector};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::flow::{derivative_at, gradient_flow};
use crate::moments::{Coordinates, Evaluator, Mean, Watched, check_noise};

/// Step of the central differences.
const STEP: f64 = 1e-4;

/// The most coordinates of a Hessian.
pub const MAX_COORDINATES: usize = 2000;

/// Singular values of `C` below this count as zero.
const RANK: f64 = 1e-7;

/// Residual at which a root solve is done.
const SOLVED: f64 = 1e-9;

/// Largest number of steps of a root solve that follows the flow.
const MAX_STEPS: usize = 1000;

/// Largest number of Newton steps.
const NEWTON_STEPS: usize = 25;

/// What to do where an evaluator has no value.
const NO_VALUE: &str = "use evaluator qmc, a looser tolerance, or smaller keys and signals";

/// What a mode moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "along", content = "feature", rename_all = "kebab-case")]
pub enum Direction {
    /// The alignments with a feature.
    Feature(usize),
    /// Keys within the directions that they already have outside the spikes.
    Residual,
    /// Keys in a direction that none of them has a part in yet: each of them, about `D - F - H`.
    Outside,
    /// Trained biases.
    Biases,
    /// Several of these.
    Several,
}

/// Whether a mode separates heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// `sum_h dk_h = 0` (weight above 0.95).
    Specialising,
    /// All heads move alike (weight below 0.05).
    Symmetric,
    /// In between.
    Mixed,
}

/// A family of modes with one growth rate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Mode {
    /// Growth rate per unit of `tau`; negative: decay.
    pub rate: f64,
    /// Standard error of the rate over scrambles; none with a single one.
    pub standard_error: Option<f64>,
    /// How many independent modes share it.
    pub degeneracy: usize,
    /// Whether it separates heads.
    pub kind: Kind,
    /// Weight on `sum_h dk_h = 0`, from 0 to 1.
    pub specialising_weight: f64,
    /// What it moves.
    pub direction: Direction,
    /// Weight on the alignments with each feature, length `F`.
    pub feature_weights: Vec<f64>,
    /// One of the modes: `dm`, `H` rows of `F`.
    pub m: Vec<Vec<f64>>,
    /// Its part outside the spikes, `H` rows.
    pub c: Vec<Vec<f64>>,
    /// Its biases, length `H`.
    pub b: Vec<f64>,
    /// The alignments' part of all modes of the family, `H x F` each; orthonormal if there is no other.
    #[serde(skip)]
    pub basis: Vec<DMatrix<f64>>,
}

impl Mode {
    /// The part of a displacement of the alignments, `H x F`, that these modes hold.
    pub fn projection(&self, displacement: &DMatrix<f64>) -> DMatrix<f64> {
        let zero = DMatrix::zeros(displacement.nrows(), displacement.ncols());
        self.basis.iter().fold(zero, |sum, mode| sum + mode * mode.dot(displacement))
    }

    /// Time until growth at this rate takes a displacement of the alignments to `threshold` in some
    /// head's alignment with `feature`; `None` if it never does, NaN if that cannot be told.
    pub fn time_to(&self, displacement: &DMatrix<f64>, feature: usize, threshold: f64) -> Option<f64> {
        let size = largest_size(self.projection(displacement).column(feature).iter());
        // What is no number is not "never".
        (!(self.rate <= 0.0) && !(size <= 0.0)).then(|| larger((threshold / size).ln() / self.rate, 0.0))
    }

    /// The mode in words: what it does, and where.
    pub fn describe(&self) -> String {
        let kind = match self.kind {
            Kind::Specialising => "specialising".to_string(),
            Kind::Symmetric => "symmetric".to_string(),
            Kind::Mixed => format!("mixed ({:.0}% specialising)", 100.0 * self.specialising_weight),
        };
        let direction = match self.direction {
            Direction::Feature(f) => format!("along s{}", f + 1),
            Direction::Residual => "outside the spikes, along the keys".into(),
            Direction::Outside => "outside the spikes, in each new direction".into(),
            Direction::Biases => "of the biases".into(),
            Direction::Several => {
                let mut parts: Vec<String> = self
                    .feature_weights
                    .iter()
                    .enumerate()
                    .filter(|(_, w)| **w > 0.01)
                    .map(|(f, w)| format!("s{} {:.0}%", f + 1, 100.0 * w))
                    .collect();
                let square = |v: &[f64]| v.iter().map(|x| x * x).sum::<f64>();
                for (name, weight) in
                    [("outside", self.c.iter().map(|row| square(row)).sum::<f64>()), ("biases", square(&self.b))]
                {
                    if weight > 0.01 {
                        parts.push(format!("{name} {:.0}%", 100.0 * weight));
                    }
                }
                format!("along {}", parts.join(", "))
            }
        };
        format!("{kind} {direction}")
    }
}

/// How far a point is from being stationary.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Residual {
    /// Largest component of the drift.
    pub size: f64,
    /// Its name, as `m[0][1]`.
    pub component: String,
    /// Standard error of that component over scrambles.
    pub standard_error: f64,
}

/// The linearisation at a point.
#[derive(Debug, Clone, PartialEq)]
pub struct Stability {
    /// The point, with `C` by its singular values, largest first.
    pub at: Coordinates,
    /// Number of directions that the keys have outside the spikes.
    pub rank: usize,
    /// Population loss.
    pub loss: f64,
    /// How far gradient flow is from being stationary there.
    pub residual: Residual,
    /// Families of modes, fastest growth first.
    pub modes: Vec<Mode>,
}

impl Stability {
    /// The same without the modes outside the spikes and of the biases: what holds at `m = 0` when the point is
    /// stationary for a flow with noise.
    pub fn along_features(mut self) -> Self {
        self.modes.retain(|mode| mode.feature_weights.iter().sum::<f64>() > 0.95);
        self
    }

    /// The Rayleigh quotient of `J` in a displacement of the alignments, `H x F`: its rate of growth if it is a
    /// mode, as a symmetry may tell.
    pub fn rate_along(&self, displacement: &DMatrix<f64>) -> f64 {
        let weight = |mode: &Mode| mode.basis.iter().map(|m| m.dot(displacement).powi(2)).sum::<f64>();
        self.modes.iter().map(|mode| mode.rate * weight(mode)).sum::<f64>() / displacement.norm_squared()
    }
}

/// The coordinates that a linearisation perturbs: `m`, the first columns of `C`, trained `b`.
#[derive(Debug, Clone, Copy)]
struct Layout {
    heads: usize,
    features: usize,
    columns: usize,
    trained: bool,
}

impl Layout {
    fn size(self) -> usize {
        self.heads * (self.features + self.columns + usize::from(self.trained))
    }

    /// What coordinate `i` is: its head and its place: a feature, then columns of `C`, then the bias.
    fn place(self, i: usize) -> (usize, usize) {
        (i % self.heads, i / self.heads)
    }

    fn name(self, i: usize) -> String {
        let (h, j) = self.place(i);
        if j < self.features {
            format!("m[{h}][{j}]")
        } else if j < self.features + self.columns {
            format!("C[{h}][{}]", j - self.features)
        } else {
            format!("b[{h}]")
        }
    }

    fn pack(self, m: &DMatrix<f64>, c: &DMatrix<f64>, b: &[f64]) -> DVector<f64> {
        DVector::from_fn(self.size(), |i, _| {
            let (h, j) = self.place(i);
            if j < self.features {
                m[(h, j)]
            } else if j < self.features + self.columns {
                c[(h, j - self.features)]
            } else {
                b[h]
            }
        })
    }

    fn unpack(self, y: &DVector<f64>, rule: Bias) -> Coordinates {
        let (h, f) = (self.heads, self.features);
        let m = DMatrix::from_fn(h, f, |i, j| y[j * h + i]);
        let c = DMatrix::from_fn(h, h, |i, j| if j < self.columns { y[(f + j) * h + i] } else { 0.0 });
        let b = if self.trained {
            (0..h).map(|i| y[(f + self.columns) * h + i]).collect()
        } else {
            biases(rule, &(&m * m.transpose() + &c * c.transpose()), &vec![0.0; h])
        };
        Coordinates { m, c, b }
    }

    fn drift<E: Evaluator>(self, evaluator: &E, y: &DVector<f64>) -> DVector<f64> {
        let at = self.unpack(y, evaluator.attention().bias);
        let (dm, dc, db) = gradient_flow(evaluator, &at);
        self.pack(&dm, &dc, &db)
    }
}

/// Rotates `C` so that its columns are orthogonal, longest first, and counts those that are not zero.
fn compressed(c: &DMatrix<f64>) -> (DMatrix<f64>, usize) {
    let n = c.nrows();
    let eigen = (c * c.transpose()).symmetric_eigen();
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|&i, &j| eigen.eigenvalues[j].total_cmp(&eigen.eigenvalues[i]));
    let size = |k: usize| eigen.eigenvalues[order[k]].max(0.0).sqrt();
    let rank = (0..n).take_while(|&k| size(k) > RANK).count();
    let column = |i: usize, k: usize| if k < rank { eigen.eigenvectors[(i, order[k])] * size(k) } else { 0.0 };
    (DMatrix::from_fn(n, n, column), rank)
}

/// Linearises gradient flow at `at`, stationary or not: see [`Stability::residual`].
///
/// # Errors
/// When there is no evaluator, the shapes of the evaluators and the point differ, there are more than
/// 2000 coordinates, the evaluators have no finite loss or gradient at the point and next to it, or `watch` interrupts.
pub fn linearise<E: Evaluator>(evaluators: &[E], at: &Coordinates, watch: &dyn Watch) -> Result<Stability, Error> {
    // Averages of many heads take long: they stop on the way, and are NaN then.
    let evaluators = &Watched::all(evaluators, watch);
    let Some(first) = evaluators.first() else {
        return Err(Error::invalid("scrambles", "there must be at least one"));
    };
    let (heads, features) = (first.heads(), first.task().features());
    if at.m.shape() != (heads, features) {
        return Err(Error::invalid(
            "m",
            format!("is {} x {} but there are {heads} heads and {features} features", at.m.nrows(), at.m.ncols()),
        ));
    }
    if at.c.shape() != (heads, heads) || at.b.len() != heads {
        let (rows, columns) = at.c.shape();
        let problem = format!("has C of {rows} x {columns} and {} biases, but there are {heads} heads", at.b.len());
        return Err(Error::invalid("m", problem));
    }
    if !at.m.iter().chain(at.c.iter()).chain(&at.b).all(|v| v.is_finite()) {
        return Err(Error::invalid("m", "the point holds a number that is not finite"));
    }
    let rule = first.attention().bias;
    let (c, rank) = compressed(&at.c);
    let layout = Layout { heads, features, columns: (rank + 1).min(heads), trained: rule == Bias::Trained };
    let y = layout.pack(&at.m, &c, &at.b);
    let size = layout.size();
    if size > MAX_COORDINATES {
        return Err(Error::invalid(
            "heads",
            format!(
                "{heads} heads have {size} coordinates here, above the limit of {MAX_COORDINATES} for a Hessian: use fewer"
            ),
        ));
    }
    let jacobian_of = |evaluator: &Watched<'_, E>| -> DMatrix<f64> {
        let columns: Vec<DVector<f64>> = (0..size)
            .into_par_iter()
            .map(|i| {
                if watch.interrupted() {
                    return DVector::zeros(size);
                }
                let at = |offset: f64| {
                    let mut y = y.clone();
                    y[i] += offset;
                    layout.drift(evaluator, &y)
                };
                (at(STEP) - at(-STEP)) / (2.0 * STEP)
            })
            .collect();
        let j = DMatrix::from_columns(&columns);
        (&j + j.transpose()) * 0.5
    };
    let jacobians: Vec<DMatrix<f64>> = evaluators.iter().map(jacobian_of).collect();
    let drifts: Vec<DVector<f64>> = evaluators.iter().map(|e| layout.drift(e, &y)).collect();
    let count = evaluators.len() as f64;
    let mean = jacobians.iter().fold(DMatrix::zeros(size, size), |sum, j| sum + j) / count;
    let at = layout.unpack(&y, rule);
    let loss = evaluators.iter().map(|e| e.loss(&at).value()).sum::<f64>() / count;
    // Before anything is decided by numbers that may be none.
    if watch.interrupted() {
        return Err(Error::interrupted("stability"));
    }
    let numbers = mean.iter().chain(drifts.iter().flatten());
    if !(loss.is_finite() && numbers.copied().all(f64::is_finite)) {
        return Err(Error::not_converged(
            "stability",
            format!("the evaluator has no finite loss and gradient at this point (loss {loss}) or next to it"),
            NO_VALUE,
        ));
    }
    Ok(Stability { rank, loss, residual: residual(layout, &drifts), modes: modes(layout, rank, &mean, &jacobians), at })
}

/// The rate `v . J v / |v|^2` along a displacement of the alignments (`H x F`), without the whole of `J`:
/// the rate of growth if it is a mode, as a symmetry may tell. NaN where the evaluator has no value.
pub fn rate_along<E: Evaluator>(evaluator: &E, at: &Coordinates, displacement: &DMatrix<f64>) -> f64 {
    let size = displacement.norm();
    let drift = |offset: f64| {
        let moved = Coordinates { m: &at.m + displacement * (offset / size), ..at.clone() };
        gradient_flow(evaluator, &moved).0
    };
    ((drift(STEP) - drift(-STEP)) / (2.0 * STEP)).dot(displacement) / size
}

fn residual(layout: Layout, drifts: &[DVector<f64>]) -> Residual {
    let count = drifts.len() as f64;
    let at = |i: usize| {
        let mean = drifts.iter().map(|d| d[i]).sum::<f64>() / count;
        let square = drifts.iter().map(|d| (d[i] - mean).powi(2)).sum::<f64>();
        (mean, (square / count / (count - 1.0).max(1.0)).sqrt())
    };
    let largest = (0..layout.size()).max_by(|&i, &j| at(i).0.abs().total_cmp(&at(j).0.abs())).unwrap_or(0);
    let (size, standard_error) = at(largest);
    Residual { size: size.abs(), component: layout.name(largest), standard_error }
}

/// Eigenvalues and eigenvectors, gathered into families.
fn modes(layout: Layout, rank: usize, mean: &DMatrix<f64>, jacobians: &[DMatrix<f64>]) -> Vec<Mode> {
    let size = layout.size();
    let eigen = mean.clone().symmetric_eigen();
    let mut order: Vec<usize> = (0..size).collect();
    order.sort_by(|&i, &j| eigen.eigenvalues[j].total_cmp(&eigen.eigenvalues[i]));
    let vectors = DMatrix::from_fn(size, size, |i, k| eigen.eigenvectors[(i, order[k])]);
    let rates: Vec<f64> = order.iter().map(|&k| eigen.eigenvalues[k]).collect();
    let count = jacobians.len() as f64;
    // One scramble does not tell its sampling error.
    let error = |v: &DVector<f64>, rate: f64| {
        let spread: f64 = jacobians.iter().map(|j| (v.dot(&(j * v)) - rate).powi(2)).sum();
        (jacobians.len() > 1).then(|| (spread / count / (count - 1.0)).sqrt())
    };
    let errors: Vec<f64> = (0..size).map(|k| error(&vectors.column(k).into_owned(), rates[k]).unwrap_or(0.0)).collect();
    let largest = largest_size(&rates);
    let alike = if jacobians.len() > 1 { 1e-5 } else { 3e-4 } * largest + 1e-9;

    let mut families = Vec::new();
    let mut start = 0;
    while start < size {
        let mut end = start + 1;
        // One rate, to the sampling error.
        while end < size && rates[end - 1] - rates[end] <= 4.0 * errors[end - 1].max(errors[end]) + alike {
            end += 1;
        }
        let group = vectors.columns(start, end - start).into_owned();
        families.extend(pure(layout, rank, &group, mean, &error));
        start = end;
    }
    families.sort_by(|a, b| b.rate.total_cmp(&a.rate));
    families
}

/// Splits the space of modes of one rate by what they do: the eigenvectors, within it, of an operator
/// that numbers the directions and the two kinds.
fn pure(
    layout: Layout,
    rank: usize,
    group: &DMatrix<f64>,
    mean: &DMatrix<f64>,
    error: &dyn Fn(&DVector<f64>, f64) -> Option<f64>,
) -> Vec<Mode> {
    let (heads, features) = (layout.heads, layout.features);
    // The part of v that separates heads.
    let differences = |v: &DVector<f64>| {
        DVector::from_fn(v.len(), |i, _| {
            let (_, j) = layout.place(i);
            v[i] - v.rows(j * heads, heads).sum() / heads as f64
        })
    };
    let sort = |j: usize| match j {
        j if j < features => Direction::Feature(j),
        j if j < features + rank => Direction::Residual,
        j if j < features + layout.columns => Direction::Outside,
        _ => Direction::Biases,
    };
    let number = |j: usize| match sort(j) {
        Direction::Feature(f) => f as f64,
        Direction::Residual => features as f64,
        Direction::Outside => features as f64 + 1.0,
        _ => features as f64 + 2.0,
    };
    let labelled = |v: &DVector<f64>| {
        let separated = differences(v);
        DVector::from_fn(v.len(), |i, _| 2.0 * number(layout.place(i).1) * v[i] + separated[i])
    };
    let images: Vec<DVector<f64>> = group.column_iter().map(|v| labelled(&v.into_owned())).collect();
    let operator = group.transpose() * DMatrix::from_columns(&images);
    let eigen = ((&operator + operator.transpose()) * 0.5).symmetric_eigen();
    let vectors = group * &eigen.eigenvectors;

    let mut families: Vec<(Mode, Vec<f64>, Vec<f64>)> = Vec::new();
    for v in vectors.column_iter().map(|v| v.into_owned()) {
        let weight_of = |wanted: &dyn Fn(usize) -> bool| -> f64 {
            (0..v.len()).filter(|&i| wanted(layout.place(i).1)).map(|i| v[i] * v[i]).sum()
        };
        let specialising_weight = differences(&v).norm_squared();
        let kind = match specialising_weight {
            w if w > 0.95 => Kind::Specialising,
            w if w < 0.05 => Kind::Symmetric,
            _ => Kind::Mixed,
        };
        let direction = (0..features + layout.columns + 1)
            .map(sort)
            .find(|&direction| weight_of(&|j| sort(j) == direction) > 0.95)
            .unwrap_or(Direction::Several);
        let rate = v.dot(&(mean * &v));
        // By direction: columns of C are arbitrary among modes of one rate.
        let of_features = (0..features).map(|f| weight_of(&|j| j == f));
        let others = [Direction::Residual, Direction::Outside, Direction::Biases];
        let weights: Vec<f64> =
            of_features.chain(others.map(|direction| weight_of(&|j| sort(j) == direction))).collect();
        let mut known = families.iter_mut().map(|(family, rates, own)| {
            let alike = own.iter().zip(&weights).all(|(a, b): (&f64, &f64)| (a - b).abs() < 0.02)
                && (family.specialising_weight - specialising_weight).abs() < 0.02;
            let pure = direction != Direction::Several && kind != Kind::Mixed;
            (family.kind == kind && family.direction == direction && (pure || alike), family, rates)
        });
        if let Some((_, family, rates)) = known.find(|(same, ..)| *same) {
            family.degeneracy += 1;
            family.basis.push(layout.unpack(&v, Bias::None).m);
            rates.push(rate);
            continue;
        }
        let standard_error = error(&v, rate);
        let at = layout.unpack(&v, Bias::None);
        let rows = |matrix: &DMatrix<f64>, columns: usize| -> Vec<Vec<f64>> {
            (0..heads).map(|h| (0..columns).map(|j| matrix[(h, j)]).collect()).collect()
        };
        let mode = Mode {
            rate,
            standard_error,
            degeneracy: 1,
            kind,
            specialising_weight,
            direction,
            feature_weights: weights[..features].to_vec(),
            m: rows(&at.m, features),
            c: rows(&at.c, layout.columns),
            b: if layout.trained { at.b } else { vec![0.0; heads] },
            basis: vec![at.m],
        };
        families.push((mode, vec![rate], weights));
    }
    families
        .into_iter()
        .map(|(mode, rates, _)| Mode { rate: rates.iter().sum::<f64>() / rates.len() as f64, ..mode })
        .collect()
}

/// The unit of rates, `omega = 2 (1 - 1/L) / (H L)` (`theory/README.md` section 8).
pub fn unit_of_rates<E: Evaluator>(evaluator: &E) -> f64 {
    let (heads, length) = (evaluator.heads() as f64, evaluator.task().length() as f64);
    2.0 * (1.0 - 1.0 / length) / (heads * length)
}

/// Refuses a point at which the flow with `noise` moves by more than `tolerance` in units of
/// [`unit_of_rates`] (beyond four standard errors of the drift over scrambles).
///
/// # Errors
/// Says which coordinate moves, and how fast, or that this cannot be told: a drift that is no number is not
/// small. When there is no evaluator, or [`check_noise`] refuses one.
pub fn check_stationary<E: Evaluator>(
    evaluators: &[E],
    point: &OrderParameters,
    noise: f64,
    tolerance: f64,
) -> Result<(), Error> {
    let Some(first) = evaluators.first() else {
        return Err(Error::invalid("scrambles", "there must be at least one"));
    };
    evaluators.iter().try_for_each(|evaluator| check_noise(evaluator, noise))?;
    let drifts: Vec<(String, f64)> = drift_of(evaluators, point, noise);
    if evaluators.iter().any(E::interrupted) {
        return Err(Error::interrupted("stability"));
    }
    // The order of `total_cmp` puts the size NaN last: the largest.
    let (name, size) =
        drifts.into_iter().max_by(|a, b| a.1.abs().total_cmp(&b.1.abs())).unwrap_or((String::new(), f64::NAN));
    let allowed = tolerance * unit_of_rates(first);
    if size.abs() <= allowed {
        return Ok(());
    }
    if !size.is_finite() {
        return Err(Error::not_converged(
            "stability",
            format!("whether this point is stationary cannot be told: d{name}/dtau is {size} there"),
            NO_VALUE,
        ));
    }
    Err(Error::invalid(
        "m",
        format!(
            "this point is not stationary: d{name}/dtau = {size:.3e} there, above {allowed:.1e}, so rates of growth mean \
             nothing; use --at plateaus or --at unspecialised, which solve for stationary points, or raise \
             --stationary-tolerance"
        ),
    ))
}

/// The drift of `m`, `r` and trained `b` at a point, less what sampling errors explain.
fn drift_of<E: Evaluator>(evaluators: &[E], point: &OrderParameters, noise: f64) -> Vec<(String, f64)> {
    let all: Vec<Vec<(String, f64)>> = evaluators
        .iter()
        .map(|evaluator| {
            let d = crate::flow::derivative(evaluator, point, noise);
            let (heads, features) = (point.heads(), point.features());
            let m = (0..heads).flat_map(|h| (0..features).map(move |f| (h, f)));
            let r = (0..heads).flat_map(|h| (0..=h).map(move |k| (h, k)));
            m.map(|(h, f)| (format!("m[{h}][{f}]"), d.m[(h, f)]))
                .chain(r.map(|(h, k)| (format!("r[{h}][{k}]"), d.r[(h, k)])))
                .chain((0..heads).map(|h| (format!("b[{h}]"), d.b[h])))
                .collect()
        })
        .collect();
    let count = all.len() as f64;
    (0..all.first().map_or(0, Vec::len))
        .map(|i| {
            let mean = all.iter().map(|d| d[i].1).sum::<f64>() / count;
            let square = all.iter().map(|d| (d[i].1 - mean).powi(2)).sum::<f64>();
            let error = (square / count / (count - 1.0).max(1.0)).sqrt();
            let significant = larger(mean.abs() - 4.0 * error, 0.0);
            (all[0][i].0.clone(), significant.copysign(mean))
        })
        .collect()
}

/// The point `k = 0`, with all biases equal: stationary ones for softmax1 with trained biases,
/// `e^b = 1 / (L (H - 1))` for sum, else 0.
///
/// # Errors
/// When softmax1's trained bias has no stationary value: one head, or aggregation mean.
pub fn zero<E: Evaluator>(evaluator: &E) -> Result<Coordinates, Error> {
    let (heads, features) = (evaluator.heads(), evaluator.task().features());
    let b = vec![stationary_bias(evaluator)?; heads];
    Ok(Coordinates { m: DMatrix::zeros(heads, features), c: DMatrix::zeros(heads, heads), b })
}

fn stationary_bias<E: Evaluator>(evaluator: &E) -> Result<f64, Error> {
    let attention = evaluator.attention();
    if attention.activation != Activation::Softmax1 || attention.bias != Bias::Trained {
        return Ok(0.0);
    }
    let (heads, length) = (evaluator.heads() as f64, evaluator.task().length() as f64);
    // g H p = 1 / L with p = e^b / (1 + L e^b).
    let spare = attention.gain(evaluator.heads()) * heads - 1.0;
    if spare <= 0.0 {
        return Err(Error::invalid(
            "bias",
            "softmax1 needs attention of more than 1 in all (aggregation sum, two heads or more) for its trained bias to \
             be stationary at k = 0; here it grows without bound",
        ));
    }
    Ok(-(length * spare).ln())
}

/// The unspecialised fixed point of the flow with `noise = gamma / B`: all heads equal, with
/// alignment `mean m`, overlap `|mean m|^2 + s` outside the spikes and one bias, found by a root
/// solve. At `noise = 0`, `s = 0`. If `E theta = 0` it has `m = 0` exactly.
///
/// # Errors
/// When the solve does not converge, or as [`zero`] and [`check_noise`].
pub fn unspecialised<E: Evaluator>(evaluators: &[E], noise: f64) -> Result<Coordinates, Error> {
    let evaluator = Mean::new(evaluators)?;
    check_noise(&evaluator, noise)?;
    let (heads, task) = (evaluator.heads(), evaluator.task());
    let features = task.features();
    let mean = task.theta().mean();
    let second = task.theta().second_moment();
    let centred = (0..features).all(|f| mean[f].abs() <= 1e-12 * second[(f, f)].sqrt().max(1e-300));
    let attention = *evaluator.attention();
    let with_bias = attention.activation == Activation::Softmax1 && attention.bias == Bias::Trained;
    let moving = if centred { 0 } else { features };
    let point = |u: &DVector<f64>| -> (Coordinates, DMatrix<f64>) {
        let m = DMatrix::from_fn(heads, features, |_, f| if f < moving { u[f] } else { 0.0 });
        let s = if noise > 0.0 { u[moving].exp() } else { 0.0 };
        let c = DMatrix::from_fn(heads, heads, |_, j| if j == 0 { s.sqrt() } else { 0.0 });
        let r = &m * m.transpose() + &c * c.transpose();
        let stored = vec![if with_bias { u[u.len() - 1] } else { 0.0 }; heads];
        let b = biases(attention.bias, &r, &stored);
        (Coordinates { m, c, b }, r)
    };
    let residual = |u: &DVector<f64>| -> Option<DVector<f64>> {
        let (at, r) = point(u);
        let (dm, dr, db) = derivative_at(&evaluator, &at, &r, noise);
        let n = heads as f64;
        let mut out = DVector::zeros(u.len());
        for f in 0..moving {
            out[f] = dm.column(f).sum() / n;
        }
        if noise > 0.0 {
            let ds = &dr - &dm * at.m.transpose() - &at.m * dm.transpose();
            // d(ln s)/dtau
            out[moving] = ds.sum() / (n * n) / u[moving].exp();
        }
        if with_bias {
            out[u.len() - 1] = db.iter().sum::<f64>() / n;
        }
        out.iter().all(|v| v.is_finite()).then_some(out)
    };
    let size = moving + usize::from(noise > 0.0) + usize::from(with_bias);
    let mut start = DVector::zeros(size);
    if noise > 0.0 {
        start[moving] = (noise / (heads * task.length()) as f64).ln();
    }
    if with_bias {
        start[size - 1] = stationary_bias(&evaluator)?;
    }
    let solved = follow(&start, &residual, 1.0 / unit_of_rates(&evaluator)).ok_or_else(|| {
        if evaluator.interrupted() {
            return Error::interrupted("stability");
        }
        Error::invalid("at", "no unspecialised fixed point was found: the heads' common motion does not settle")
    })?;
    Ok(point(&solved).0)
}

/// Longest step of a coordinate on the way: further, another stationary point may be nearer.
const LONGEST_STEP: f64 = 0.5;

/// The stationary point to which `du/dtau = f(u)` leads: implicit steps that grow, from the first `time_step`
/// on, and are Newton's at the end. Where a direction grows, at a rate `lambda`, steps stay below `1 / (2 lambda)`: beyond
/// `1 / lambda` an implicit step goes backwards, to where the flow came from or to a saddle.
fn follow(
    start: &DVector<f64>,
    f: &dyn Fn(&DVector<f64>) -> Option<DVector<f64>>,
    mut time_step: f64,
) -> Option<DVector<f64>> {
    let mut u = start.clone();
    if u.is_empty() {
        return Some(u);
    }
    // Drifts are of the order of the inverse of the first step.
    let solved = SOLVED / time_step;
    let mut value = f(&u)?;
    for _ in 0..MAX_STEPS {
        if largest_size(value.iter()) <= solved {
            return Some(u);
        }
        let jacobian = differences(&u, &value, f)?;
        let fastest = largest(jacobian.complex_eigenvalues().iter().map(|e| e.re));
        if fastest > 0.0 {
            time_step = time_step.min(0.5 / fastest);
        }
        let system = DMatrix::identity(u.len(), u.len()) / time_step - jacobian;
        let step = system.lu().solve(&value)?;
        let next = &u + &step;
        match f(&next).filter(|_| largest_size(step.iter()) < LONGEST_STEP) {
            Some(new) => {
                // Faster as the drift falls.
                time_step = (time_step
                    * (largest_size(value.iter()) / largest_size(new.iter()).max(1e-300)).clamp(2.0, 10.0))
                .min(1e15);
                (u, value) = (next, new);
            }
            None => time_step *= 0.25,
        }
    }
    (largest_size(value.iter()) <= 1e3 * solved).then_some(u)
}

fn differences(
    u: &DVector<f64>,
    value: &DVector<f64>,
    f: &dyn Fn(&DVector<f64>) -> Option<DVector<f64>>,
) -> Option<DMatrix<f64>> {
    const FORWARD: f64 = 1e-6;
    let mut columns = Vec::with_capacity(u.len());
    for i in 0..u.len() {
        let mut shifted = u.clone();
        shifted[i] += FORWARD;
        columns.push((f(&shifted)? - value) / FORWARD);
    }
    // Decompositions of a matrix that is not finite need not end.
    Some(DMatrix::from_columns(&columns)).filter(|jacobian| jacobian.iter().all(|v| v.is_finite()))
}

/// The stationary point of the flow with `noise` next to `near`, stable or not: Newton's method with
/// the least step where the Jacobian is singular (flat directions stay as they are).
///
/// # Errors
/// When the drift stays above `tolerance` (a plateau may be a slow passage, as where biases of heads that
/// are off fall for ever), or the solve ends farther than `reach` from where it began in some
/// alignment: there is no stationary point nearby. As [`check_noise`].
pub fn stationary_near<E: Evaluator>(
    evaluators: &[E],
    near: &OrderParameters,
    noise: f64,
    reach: f64,
    tolerance: f64,
) -> Result<Coordinates, Error> {
    let evaluator = Mean::new(evaluators)?;
    check_noise(&evaluator, noise)?;
    let rule = evaluator.attention().bias;
    let (heads, features) = (near.heads(), near.features());
    let trained = rule == Bias::Trained;
    let (c, rank) = compressed(&near.residual_factor());
    let layout = Layout { heads, features, columns: rank, trained };
    // With noise the unknowns are m, C (lower triangular, so that S = C C^T is always possible) and b, and
    // what must vanish are the drifts of m, S and b; else m, C, b and their own.
    let triangle = heads * (heads + 1) / 2;
    let unpack = |y: &DVector<f64>| -> Coordinates {
        if noise == 0.0 {
            return layout.unpack(y, rule);
        }
        let m = DMatrix::from_fn(heads, features, |h, f| y[f * heads + h]);
        let c =
            DMatrix::from_fn(heads, heads, |h, k| if k <= h { y[heads * features + h * (h + 1) / 2 + k] } else { 0.0 });
        let s = &c * c.transpose();
        let r = &m * m.transpose() + &s;
        let stored: Vec<f64> =
            (0..heads).map(|h| if trained { y[heads * features + triangle + h] } else { 0.0 }).collect();
        Coordinates { b: biases(rule, &r, &stored), m, c }
    };
    // None where it is not finite: there is no way from there.
    let drift = |y: &DVector<f64>| -> Option<DVector<f64>> {
        let finite = |drift: DVector<f64>| drift.iter().all(|v| v.is_finite()).then_some(drift);
        if noise == 0.0 {
            return finite(layout.drift(&evaluator, y));
        }
        let at = unpack(y);
        let (dm, dr, db) = derivative_at(&evaluator, &at, &at.r(), noise);
        let ds = &dr - &dm * at.m.transpose() - &at.m * dm.transpose();
        let lower = (0..heads).flat_map(|h| (0..=h).map(move |k| (h, k)));
        let values: Vec<f64> = dm
            .iter()
            .copied()
            .chain(lower.map(|(h, k)| ds[(h, k)]))
            .chain(db.iter().copied().take(if trained { heads } else { 0 }))
            .collect();
        finite(DVector::from_vec(values))
    };
    let start = if noise == 0.0 {
        layout.pack(near.m(), &c, near.b())
    } else {
        let c = near.residual_factor();
        let lower = (0..heads).flat_map(|h| (0..=h).map(move |k| (h, k)));
        let values: Vec<f64> = near
            .m()
            .iter()
            .copied()
            .chain(lower.map(|(h, k)| c[(h, k)]))
            .chain(near.b().iter().copied().take(if trained { heads } else { 0 }))
            .collect();
        DVector::from_vec(values)
    };
    let failed = |how: String| {
        // Without numbers the solve fails, in one way or another.
        if evaluator.interrupted() {
            return Error::interrupted("stability");
        }
        Error::invalid(
            "at",
            format!("there is no stationary point near the plateau: {how}; it is a slow passage, not a fixed point"),
        )
    };
    let mut y = start.clone();
    let mut value = drift(&y).ok_or_else(|| failed("the drift has no finite value there".into()))?;
    for _ in 0..NEWTON_STEPS {
        if largest_size(value.iter()) <= SOLVED {
            break;
        }
        let jacobian = differences(&y, &value, &drift);
        if evaluator.interrupted() {
            return Err(Error::interrupted("stability"));
        }
        let jacobian = jacobian.ok_or_else(|| failed("the drift has no finite value next to it".into()))?;
        let svd = jacobian.svd(true, true);
        let cut = 1e-5 * largest(svd.singular_values.iter());
        let step = svd.solve(&-&value, cut).map_err(|e| failed(e.into()))?;
        let mut scale = (0.3 / largest_size(step.iter())).min(1.0);
        let next = loop {
            let next = &y + &step * scale;
            match drift(&next) {
                Some(new) if new.norm() < value.norm() || scale < 1e-3 => break Some((next, new)),
                _ if scale < 1e-6 => break None,
                _ => scale *= 0.5,
            }
        };
        let Some((next, new)) = next else { break };
        let progress = new.norm() < 0.999 * value.norm();
        (y, value) = (next, new);
        if !progress && largest_size(value.iter()) < 1e-6 {
            break;
        }
    }
    if evaluator.interrupted() {
        return Err(Error::interrupted("stability"));
    }
    let moved = largest_size((0..heads * features).map(|i| (y[i] - start[i]).abs()));
    let left = largest_size(value.iter());
    if !(left <= tolerance) {
        return Err(failed(format!("the solve stops at a drift of {left:.1e}, above {tolerance:e}")));
    }
    if !(moved <= reach) {
        return Err(failed(format!("the nearest one found is {moved:.2} away in an alignment")));
    }
    Ok(unpack(&y))
}
