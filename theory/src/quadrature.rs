//! Population loss and gradient by quadrature, for any sequence length (`theory/README.md` section 14).
//!
//! ```text
//! E = 1 - 2 g sum_h E[A_h,eps] + g^2 sum_hh' E[sum_l A_hl A_h'l]
//! ```
//!
//! `1/S = int_0^inf e^{-uS} du` makes the tokens independent, so that the cost does not depend on `L`:
//! heads one by one and in pairs for softmax and softmax1, one common `u` for bayes-softmax. The trapezoid
//! rule in `ln u` and in the Gaussians converges geometrically; steps and cut-offs follow from the tolerance
//! and from the sizes of the scores, are checked against a coarser evaluation, and refined
//! where that does not bear them out.
//!
//! bayes-softmax needs the joint law of all scores: a product grid up to rank 3 of `r`, quasi-Monte Carlo over the
//! scores of one token above (with its standard error).

pub(crate) mod lattice;
mod pairs;
pub(crate) mod shared;
pub(crate) mod signals;

use std::sync::atomic::{AtomicU64, Ordering};

use headflow_model::{
    Activation, Attention, Budget, Cost, Error, Task, Unwatched, Watch, larger, largest, largest_size, mean_and_error,
};
use nalgebra::DMatrix;
use rayon::prelude::*;

use crate::moments::{Coordinates, Evaluator, Loss, Moments};
use lattice::Precision;
use pairs::Contribution;
use shared::Rule;
use signals::Signals;

/// Tightest tolerance: rounding is not far below.
pub const TIGHTEST: f64 = 1e-13;

/// Loosest tolerance.
pub const LOOSEST: f64 = 1e-2;

/// How far beyond the tolerance steps are chosen for: `Lambda = MARGIN - ln(tolerance)`.
const MARGIN: f64 = 7.0;

/// The check's `Lambda`, as a fraction.
const COARSER: f64 = 0.75;

/// Values of `Lambda` that are tried, each above the one before.
const REFINEMENTS: usize = 5;

/// By how much.
const FINER: f64 = 1.2;

/// The estimate is this many times what geometric convergence, at the rate that the check shows, makes of it.
const SAFETY: f64 = 10.0;

/// Errors are up to this many times `e^{-Lambda}`: towards the edge of the strip the kernels `G_k` grow like `a^k`, which makes for
/// powers of `Lambda`, more for the gradient than for the loss.
pub(crate) const PREFACTORS: [f64; 2] = [100.0, 1000.0];

/// Added to `Lambda` where the gradient is wanted too.
const MORE_FOR_GRADIENT: f64 = 2.5;

/// Rounding of a sum of many terms: beside it there is that of the scores and of `ln u`, relative to their size, of which a
/// moment changes by less than it is.
const ROUNDING: f64 = 5e-14;

/// Operations of an evaluation, all its refinements together: about ten seconds of one core.
const MOST_OPERATIONS: f64 = Cost::MOST_OPERATIONS;

/// Most operations of a finer rule that cannot meet the tolerance either: about two seconds.
const HOPELESS_OPERATIONS: f64 = 0.2 * Cost::MOST_OPERATIONS;

/// Operations of a multiplication in a product of matrices.
const MULTIPLICATION: f64 = 0.2;

/// Most points `(t, t')` of a pair, or of a score (some are held at once).
const MOST_POINTS: f64 = 6e6;

/// Scores wider than this, and more heads and pairs with more components than this, have their work counted before it is done:
/// below, none takes more than 2e8 operations.
const COUNTED: f64 = 6.0;
const COUNTED_PIECES: f64 = 100.0;

/// More of those are not even counted: each takes 1e6 operations and more.
const MOST_PIECES: f64 = 2e4;

/// Biases beyond this size are looked at for what they do: a head may be off, or the 1 of softmax1 have no weight.
const FAR: f64 = 1e3;

/// Deviation from which scores count as no larger: the wider they are, the more rarely two are so near that rounding has an effect.
const COMMON: f64 = 10.0;

/// Largest score and `ln u`: rounding of larger ones spoils all digits that are left.
const LARGEST_SCORE: f64 = 1e10;

/// Scrambles of the quasi-Monte Carlo rule, and its first and last number of points.
pub(crate) const SCRAMBLES: u32 = 8;
const FIRST_POINTS: usize = 1 << 11;
const LAST_POINTS: usize = 1 << 15;

/// Points of that rule for each token of a sequence: fewer do not hold the largest of its weights.
pub(crate) const POINTS_PER_TOKEN: f64 = 8.0;

/// Standard errors that count as the error of a quasi-Monte Carlo average.
pub(crate) const STANDARD_ERRORS: f64 = 3.0;

/// An evaluator that is exact to a tolerance. A clone keeps a record of its own errors, from none on.
#[derive(Debug)]
pub struct Quadrature {
    task: Task,
    heads: usize,
    attention: Attention,
    tolerance: f64,
    signals: Signals,
    /// Bits of the largest error estimate so far: those of positive numbers are ordered like the numbers.
    worst: AtomicU64,
}

impl Clone for Quadrature {
    fn clone(&self) -> Self {
        let Self { task, heads, attention, tolerance, signals, worst: _ } = self;
        Self {
            task: task.clone(),
            heads: *heads,
            attention: *attention,
            tolerance: *tolerance,
            signals: signals.clone(),
            worst: AtomicU64::default(),
        }
    }
}

/// Derivatives of the population loss.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradient {
    /// In the alignments at fixed overlaps, `H x F`.
    pub m: DMatrix<f64>,
    /// In the overlaps: `dE = sum_hh' R_hh' dr_hh'` over both orders, `R` symmetric, `H x H`.
    pub r: DMatrix<f64>,
    /// In the biases that enter the scores, length `H`.
    pub b: Vec<f64>,
}

/// The moments of each head and each pair of heads under softmax or softmax1, of which the loss of any set of heads is made:
/// `E = 1 - 2 g sum_h E[A_h,eps] + g^2 sum_hh' E[sum_l A_hl A_h'l]`, `g = 1 / heads` for mean, 1 for sum.
#[derive(Debug, Clone, PartialEq)]
pub struct HeadMoments {
    /// `E[A_h,eps]`, length `H`.
    pub relevant: Vec<f64>,
    /// `E[sum_l A_hl A_h'l]`, `H x H`.
    pub products: DMatrix<f64>,
    /// Estimated error of each.
    pub error_estimate: f64,
    attention: Attention,
}

impl HeadMoments {
    /// The loss of the heads `kept` alone.
    pub fn loss(&self, kept: &[usize]) -> Loss {
        let g = self.attention.gain(kept.len());
        let products = kept.iter().flat_map(|&h| kept.iter().map(move |&k| self.products[(h, k)]));
        Loss {
            attention_on_relevant: g * kept.iter().map(|&h| self.relevant[h]).sum::<f64>(),
            second_moment: g * g * products.sum::<f64>(),
        }
    }
}

/// A loss, what it is made of, and how exact it is.
#[derive(Debug, Clone, PartialEq)]
pub struct Evaluation {
    /// The loss.
    pub loss: Loss,
    /// Its gradient, when asked for.
    pub gradient: Option<Gradient>,
    /// Estimated error of the loss and of its two parts.
    pub error_estimate: f64,
    /// Estimated largest error of an entry of the gradient; zero without one.
    pub gradient_error_estimate: f64,
}

impl Evaluation {
    fn mean(all: &[Self]) -> Option<Self> {
        let count = all.len() as f64;
        let mut sum = all.first()?.clone();
        for other in &all[1..] {
            sum.loss.attention_on_relevant += other.loss.attention_on_relevant;
            sum.loss.second_moment += other.loss.second_moment;
            if let (Some(sum), Some(other)) = (&mut sum.gradient, &other.gradient) {
                sum.m += &other.m;
                sum.r += &other.r;
                sum.b.iter_mut().zip(&other.b).for_each(|(s, o)| *s += o);
            }
        }
        sum.loss.attention_on_relevant /= count;
        sum.loss.second_moment /= count;
        if let Some(gradient) = &mut sum.gradient {
            gradient.m /= count;
            gradient.r /= count;
            gradient.b.iter_mut().for_each(|b| *b /= count);
        }
        Some(sum)
    }

    /// The numbers of an evaluation: loss and parts, then the gradient.
    fn numbers(&self) -> (Vec<f64>, Vec<f64>) {
        let loss = vec![self.loss.value(), self.loss.attention_on_relevant, self.loss.second_moment];
        let gradient = self
            .gradient
            .as_ref()
            .map(|g| g.m.iter().chain(g.r.iter()).chain(&g.b).copied().collect())
            .unwrap_or_default();
        (loss, gradient)
    }

    /// Largest differences of the loss and its parts, and of the gradient.
    fn distance(&self, other: &Self) -> [f64; 2] {
        let apart = |a: &[f64], b: &[f64]| largest_size(a.iter().zip(b).map(|(x, y)| x - y));
        let ((a, ga), (b, gb)) = (self.numbers(), other.numbers());
        [apart(&a, &b), apart(&ga, &gb)]
    }
}

/// Evaluates at `Lambda` for a tolerance and, for a check, at less, then at more until the estimated errors meet the
/// tolerance: the best value and its errors. None where not even two evaluations are to be had.
///
/// Errors fall like `e^{-rate Lambda}` at a rate that need not be 1: if the coarser value is off by `e^{-rate Lambda}`, then a
/// finer one, with `ratio` times its `Lambda`, is off by the power `ratio` of that.
pub(crate) fn refined<T>(
    tolerance: f64,
    mut at: impl FnMut(f64) -> Option<T>,
    distance: impl Fn(&T, &T) -> [f64; 2],
) -> Option<(T, [f64; 2])> {
    // A difference that is small by chance says nothing: never less than the steps were chosen for.
    let estimate = |differences: [f64; 2], ratio: f64, lambda: f64| -> [f64; 2] {
        std::array::from_fn(|i| {
            let [difference, least] = [differences[i], PREFACTORS[i] * (-lambda).exp()];
            larger((SAFETY * difference.powf(ratio)).min(difference), larger(difference * 0.0, least))
        })
    };
    let mut lambda = MARGIN - tolerance.ln();
    let mut ratio = 1.0 / COARSER;
    let mut finest = at(lambda * COARSER)?;
    let mut errors = None;
    for _ in 0..REFINEMENTS {
        let Some(finer) = at(lambda) else {
            // Too much work: a coarser check of what there is tells its error.
            if errors.is_none() {
                let coarser = at(lambda * COARSER * COARSER)?;
                errors = Some(estimate(distance(&finest, &coarser), ratio, lambda * COARSER));
            }
            break;
        };
        let found = estimate(distance(&finer, &finest), ratio, lambda);
        finest = finer;
        errors = Some(found);
        if larger(found[0], found[1]) <= tolerance {
            break;
        }
        lambda *= FINER;
        ratio = FINER;
    }
    errors.map(|errors| (finest, errors))
}

/// What `work` gives; where it gives nothing, what it spent is not counted.
pub(crate) fn budgeted<T>(budget: &Budget, work: impl FnOnce() -> Option<T>) -> Option<T> {
    let before = budget.spent();
    let found = work();
    if found.is_none() {
        budget.restore(before);
    }
    found
}

/// A point as the integrals need it, every number finite.
struct Place {
    m: DMatrix<f64>,
    r: DMatrix<f64>,
    /// Biases that have an effect.
    b: Vec<f64>,
    /// Largest size of the scores whose rounding has an effect.
    size: f64,
}

impl Quadrature {
    /// An evaluator with the given absolute tolerance, from `1e-13` to `1e-2`.
    ///
    /// # Errors
    /// When `heads` is zero, the tolerance is out of range, or the support of `theta` has more than 4096 points.
    pub fn new(task: &Task, heads: usize, attention: Attention, tolerance: f64) -> Result<Self, Error> {
        if heads == 0 {
            return Err(Error::invalid("heads", "there must be at least one"));
        }
        check_tolerance(tolerance)?;
        Ok(Self {
            task: task.clone(),
            heads,
            attention,
            tolerance,
            signals: Signals::new(task.theta())?,
            worst: AtomicU64::default(),
        })
    }

    /// The largest error estimate of all evaluations so far, of losses and gradients: whoever takes many, as a flow does, may
    /// ask afterwards whether the tolerance was met throughout.
    pub fn worst_error(&self) -> f64 {
        f64::from_bits(self.worst.load(Ordering::Relaxed))
    }

    /// The tolerance that was asked for.
    pub fn tolerance(&self) -> f64 {
        self.tolerance
    }

    /// The loss, to the tolerance.
    ///
    /// # Errors
    /// When the tolerance cannot be met: says what was reached.
    pub fn loss_to_tolerance(&self, at: &Coordinates) -> Result<Evaluation, Error> {
        self.met(at, false)
    }

    /// The loss and its gradient, to the tolerance.
    ///
    /// # Errors
    /// As [`Quadrature::loss_to_tolerance`].
    pub fn gradient_to_tolerance(&self, at: &Coordinates) -> Result<Evaluation, Error> {
        self.met(at, true)
    }

    /// The moments of all heads and pairs at a point, the best that can be had; none for bayes-softmax, whose heads are
    /// normalised against each other.
    pub fn head_moments(&self, at: &Coordinates) -> Option<HeadMoments> {
        if self.attention.activation == Activation::BayesSoftmax {
            return None;
        }
        let (place, heads) = (self.place(at).ok()?, self.heads);
        let budget = Budget::new(MOST_OPERATIONS);
        let of = |lambda| {
            let parts = budgeted(&budget, || self.contributions(&place, self.precision(lambda), false, &budget))?;
            let mut found = (vec![0.0; heads], DMatrix::zeros(heads, heads));
            for part in parts {
                let [h, k] = part.heads;
                if h == k {
                    found.0[h] = part.first;
                }
                found.1[(h, k)] = part.second;
                found.1[(k, h)] = part.second;
            }
            Some(found)
        };
        let distance = |a: &(Vec<f64>, DMatrix<f64>), b: &(Vec<f64>, DMatrix<f64>)| {
            let first = largest_size(a.0.iter().zip(&b.0).map(|(x, y)| x - y));
            [first, largest_size((&a.1 - &b.1).iter())]
        };
        let ((relevant, products), errors) = refined(self.tolerance, of, distance)?;
        let error_estimate = larger(errors[0], errors[1]) + ROUNDING + f64::EPSILON * place.size;
        Some(HeadMoments { relevant, products, error_estimate, attention: self.attention })
    }

    /// What [`Quadrature::evaluate`] gives, if it meets the tolerance.
    fn met(&self, at: &Coordinates, gradient: bool) -> Result<Evaluation, Error> {
        let evaluation = self.counted(at, gradient, &Unwatched)?;
        let reached = larger(evaluation.error_estimate, evaluation.gradient_error_estimate);
        if reached <= self.tolerance {
            return Ok(evaluation);
        }
        if !reached.is_finite() {
            return Err(Error::invalid(
                "tolerance",
                format!(
                    "{:e} cannot be met here: keys or signals this large (or, where bayes-softmax has r of rank above 3, \
                     sequences this long) need more work than a quadrature may take; use a looser one, or evaluator qmc",
                    self.tolerance
                ),
            ));
        }
        let why = if self.attention.activation == Activation::BayesSoftmax {
            "; bayes-softmax is exact where r has rank 3 or less and no score varies by more than about 100"
        } else {
            ""
        };
        Err(Error::invalid(
            "tolerance",
            format!(
                "{:e} cannot be met here: reached {reached:.1e} (loss {:.10}); ask for that{why}",
                self.tolerance,
                evaluation.loss.value()
            ),
        ))
    }

    /// The best that can be had at a point, with its error estimate, above the tolerance or not.
    ///
    /// Where it would take too much work there are no numbers (NaN), and the error is infinite.
    pub fn evaluate(&self, at: &Coordinates, gradient: bool) -> Evaluation {
        self.evaluate_watched(at, gradient, &Unwatched)
    }

    /// [`Quadrature::evaluate`], but soon and all NaN once `watch` interrupts.
    pub fn evaluate_watched(&self, at: &Coordinates, gradient: bool, watch: &dyn Watch) -> Evaluation {
        self.counted(at, gradient, watch).unwrap_or_else(|_| self.nothing(gradient))
    }

    /// The same, or what is too much about it.
    fn counted(&self, at: &Coordinates, gradient: bool, watch: &dyn Watch) -> Result<Evaluation, Error> {
        let found = self.best(at, gradient, watch);
        if watch.interrupted() {
            // Broken off: no evaluation, and no error of one.
            return Ok(self.nothing(gradient));
        }
        // What is no number is refused where it is met; it is no error of a number.
        if let Ok(evaluation) = &found {
            let worst = larger(evaluation.error_estimate, evaluation.gradient_error_estimate);
            if worst.is_finite() {
                self.worst.fetch_max(worst.to_bits(), Ordering::Relaxed);
            }
        }
        found
    }

    fn best(&self, at: &Coordinates, gradient: bool, watch: &dyn Watch) -> Result<Evaluation, Error> {
        assert_eq!(at.m.shape(), (self.heads, self.task.features()), "m does not fit");
        assert_eq!(at.b.len(), self.heads, "b does not fit");
        let place = self.place(at)?;
        let budget = Budget::watched(MOST_OPERATIONS, watch);
        let at_precision = |lambda| budgeted(&budget, || self.at_precision(&place, lambda, gradient, &budget));
        let evaluation = match refined(self.tolerance, at_precision, Evaluation::distance) {
            Some((mut evaluation, [loss, of_gradient])) => {
                let rounding = (ROUNDING + f64::EPSILON * place.size) * (1.0 + evaluation.loss.second_moment)
                    + evaluation.error_estimate;
                evaluation.error_estimate = loss + rounding;
                evaluation.gradient_error_estimate = if gradient { of_gradient + rounding } else { 0.0 };
                evaluation
            }
            None if self.attention.activation == Activation::BayesSoftmax => {
                self.by_quasi_monte_carlo(&place, gradient, &budget)
            }
            None => self.nothing(gradient),
        };
        // What is given as no number at all is given with its reason.
        if !evaluation.error_estimate.is_finite() {
            let (field, advice) = self.too_much(&place);
            budget.check(field, advice)?;
        }
        Ok(in_range(evaluation))
    }

    /// The point as it enters the integrals. A common part of all biases of bayes-softmax has no effect, nor has any bias of
    /// softmax: they would only cost digits.
    ///
    /// # Errors
    /// When a number is not finite, or so large that rounding leaves nothing of a score.
    fn place(&self, at: &Coordinates) -> Result<Place, Error> {
        if !at.b.iter().all(|b| b.is_finite()) {
            return Err(Error::invalid("b", "holds a number that is not finite"));
        }
        let r = at.r();
        let b = match self.attention.activation {
            Activation::Softmax => vec![0.0; self.heads],
            _ => at.near_biases(&self.attention),
        };
        let precision = self.precision(MARGIN - self.tolerance.ln());
        let scores = |widest: f64| {
            largest_size((0..self.heads).map(|h| {
                let (mean, variance) = self.signals.score(&at.m.row(h).transpose());
                // Rounding may leave a variance below 0.
                let deviation = larger(r[(h, h)] + variance, 0.0).sqrt();
                mean + precision.reach() * if deviation > widest { widest } else { deviation }
            }))
        };
        let size = scores(f64::INFINITY);
        if !(size <= LARGEST_SCORE) {
            // Which of them: alignments, keys or the signal.
            let field = match (largest_size(at.m.iter()), largest(r.diagonal().iter()).sqrt()) {
                (m, _) if !(m <= FAR) => "m",
                (_, key) if !(key <= FAR) => "r",
                _ => "theta",
            };
            return Err(Error::too_costly(
                field,
                if size.is_finite() {
                    format!("makes scores of size {size:.1e}")
                } else {
                    "makes scores beyond all numbers".into()
                },
                format!("{LARGEST_SCORE:.0e}, beyond which rounding leaves nothing of them"),
                "use smaller alignments or a weaker signal",
            ));
        }
        let rounded = scores(COMMON);
        let mut place = Place { m: at.m.clone(), r, b, size: rounded };
        // Of the biases, those that still have an effect.
        let biases = (0..self.heads).map(|h| match self.regime(&place, h, precision) {
            (b, _, true) => b,
            (.., false) => 0.0,
        });
        place.size += largest_size(biases);
        Ok(place)
    }

    /// The field that makes an evaluation too costly, and what would be cheaper.
    fn too_much(&self, place: &Place) -> (&'static str, &'static str) {
        let widest = |of: &dyn Fn(usize) -> f64| largest((0..self.heads).map(of));
        let keys = widest(&|h| place.r[(h, h)]);
        let signal = widest(&|h| self.signals.score(&place.m.row(h).transpose()).1);
        if signal > keys.max(COUNTED * COUNTED) {
            ("theta", "use a narrower theta, smaller alignments m, or evaluator qmc")
        } else if keys > COUNTED * COUNTED {
            ("r", "use smaller keys (m and r), or evaluator qmc")
        } else {
            ("heads", "use fewer heads or support points, a looser tolerance, or evaluator qmc")
        }
    }

    /// What there is where an evaluation would take too much work.
    fn nothing(&self, gradient: bool) -> Evaluation {
        Evaluation {
            loss: Loss { attention_on_relevant: f64::NAN, second_moment: f64::NAN },
            gradient: gradient.then(|| self.no_gradient()),
            error_estimate: f64::INFINITY,
            gradient_error_estimate: if gradient { f64::INFINITY } else { 0.0 },
        }
    }

    fn no_gradient(&self) -> Gradient {
        let matrix = |columns| DMatrix::from_element(self.heads, columns, f64::NAN);
        Gradient { m: matrix(self.task.features()), r: matrix(self.heads), b: vec![f64::NAN; self.heads] }
    }

    fn precision(&self, lambda: f64) -> Precision {
        Precision { lambda, tokens: self.task.length() as f64 }
    }

    /// One evaluation with steps for an error `e^-lambda`; none where it would take too much work. Its error estimate is what is
    /// left out of the law of the scores.
    fn at_precision(&self, place: &Place, lambda: f64, gradient: bool, budget: &Budget) -> Option<Evaluation> {
        let lambda = if gradient { lambda + MORE_FOR_GRADIENT } else { lambda };
        let shared = self.attention.activation == Activation::BayesSoftmax;
        self.signals.count(&place.m, self.precision(lambda), shared)?;
        match self.attention.activation {
            Activation::BayesSoftmax => self.shared_at(place, self.precision(lambda), gradient, &Rule::Tensor, budget),
            _ => self.pairs_at(place, self.precision(lambda), gradient, budget),
        }
    }

    /// What the bias of a head comes to: the bias, whether the 1 of softmax1 has weight beside it, and whether the head is on.
    ///
    /// `1/(1 + S) <= min(1, e^{-s})` for any score `s` of another token, a normal variable about `b`: on average at most
    /// `P(s < b/2) + e^{-b/2} <= e^{-b^2/(8 r)} + e^{-b/2}`, by which softmax1 differs from softmax. And `A <= e^s`.
    fn regime(&self, place: &Place, h: usize, precision: Precision) -> (f64, bool, bool) {
        let (b, leak) = (place.b[h], self.attention.activation == Activation::Softmax1);
        if b.abs() <= FAR || self.attention.activation == Activation::Softmax {
            return (b, leak, true);
        }
        let negligible = precision.of_token() + MARGIN;
        if b > 0.0 {
            let softmax = 0.5 * b > negligible && b * b > 8.0 * place.r[(h, h)] * negligible;
            return if softmax { (0.0, false, true) } else { (b, true, true) };
        }
        let (mean, variance) = self.signals.score(&place.m.row(h).transpose());
        let highest = b + mean + (2.0 * negligible * (place.r[(h, h)] + variance)).sqrt();
        (b, true, highest > -negligible)
    }

    /// What each head and each pair contributes; none where that would take too much work.
    fn contributions(
        &self,
        place: &Place,
        precision: Precision,
        gradient: bool,
        budget: &Budget,
    ) -> Option<Vec<Contribution>> {
        let (g, heads) = (self.attention.gain(self.heads), self.heads);
        let regimes: Vec<_> = (0..heads).map(|h| self.regime(place, h, precision)).collect();
        let b: Vec<f64> = regimes.iter().map(|regime| regime.0).collect();
        let leaks: Vec<bool> = regimes.iter().map(|regime| regime.1).collect();
        let on = |h: usize| regimes[h].2;
        // A pair stands for both of its orders.
        let ask = |second: f64| pairs::Question {
            m: &place.m,
            r: &place.r,
            b: &b,
            signals: &self.signals,
            precision,
            leaks: &leaks,
            weights: [-2.0 * g, second * g * g],
            gradient,
            budget,
        };
        let question = ask(2.0);
        let pieces = 0.5 * heads as f64 * (heads as f64 + 1.0) * self.signals.count(&place.m, precision, false)?;
        if pieces > MOST_PIECES {
            budget.spend(1e6 * pieces)?;
        }
        let tasks: Vec<[usize; 2]> = (0..heads).flat_map(|h| (0..=h).map(move |k| [h, k])).collect();
        // Scores of ordinary size never come near the bounds.
        let wide = |h: usize| {
            place.r[(h, h)] + self.signals.score(&place.m.row(h).transpose()).1 > COUNTED * COUNTED || place.b[h] > FAR
        };
        let counted = if pieces > COUNTED_PIECES || (0..heads).any(wide) { &tasks[..] } else { &[] };
        let mut most = 0.0;
        for &[h, k] in counted.iter().filter(|[h, k]| on(*h) && on(*k)) {
            let work = if h == k { pairs::single_work(&question, h) } else { pairs::work(&question, h, k) };
            // A single piece keeps a single thread busy.
            let threads = if pieces < 2.0 { 2.0 } else { 1.0 };
            budget.spend(threads * MULTIPLICATION * work.multiplications)?;
            if !(work.points <= MOST_POINTS && work.bytes <= Cost::MOST_BYTES) {
                return budget.spend(f64::INFINITY).map(|()| Vec::new());
            }
            most = larger(most, work.bytes);
        }
        let of = |&[h, k]: &[usize; 2]| match (on(h) && on(k), h == k) {
            (false, _) => Contribution::zero([h, k], place.m.ncols()),
            (true, true) => pairs::single(&ask(1.0), h),
            (true, false) => pairs::pair(&question, h, k),
        };
        // Each thread may hold some.
        let parts = if 2.0 * rayon::current_num_threads() as f64 * most > Cost::MOST_BYTES {
            tasks.iter().map(of).collect()
        } else {
            tasks.par_iter().map(of).collect()
        };
        (!budget.interrupted()).then_some(parts)
    }

    fn pairs_at(&self, place: &Place, precision: Precision, gradient: bool, budget: &Budget) -> Option<Evaluation> {
        let (g, heads) = (self.attention.gain(self.heads), self.heads);
        let parts = self.contributions(place, precision, gradient, budget)?;
        let mut loss = Loss::default();
        let mut sum = Gradient {
            m: DMatrix::zeros(heads, self.task.features()),
            r: DMatrix::zeros(heads, heads),
            b: vec![0.0; heads],
        };
        for part in parts {
            let [h, k] = part.heads;
            loss.attention_on_relevant += g * part.first;
            loss.second_moment += g * g * part.second * if h == k { 1.0 } else { 2.0 };
            for (i, head) in part.heads.into_iter().enumerate() {
                sum.b[head] += part.b[i];
                let mut row = sum.m.row_mut(head);
                row += part.m[i].transpose();
            }
            sum.r[(h, h)] += part.r[0];
            sum.r[(k, k)] += part.r[2];
            if h != k {
                // The derivative with r_hh' and r_h'h moving together, shared between the two.
                sum.r[(h, k)] += 0.5 * part.r[1];
                sum.r[(k, h)] += 0.5 * part.r[1];
            }
        }
        Some(Evaluation { loss, gradient: gradient.then_some(sum), error_estimate: 0.0, gradient_error_estimate: 0.0 })
    }

    fn shared_at(
        &self,
        place: &Place,
        precision: Precision,
        gradient: bool,
        rule: &Rule,
        budget: &Budget,
    ) -> Option<Evaluation> {
        let g = self.attention.gain(self.heads);
        let components = self.signals.components(&place.m, precision);
        let question = shared::Question {
            m: &place.m,
            r: &place.r,
            b: &place.b,
            components: &components,
            covariance: self.signals.covariance.as_ref(),
            precision,
            weights: [-2.0 * g, g * g],
            gradient,
        };
        let answer = shared::evaluate(&question, rule, budget)?;
        Some(Evaluation {
            loss: Loss { attention_on_relevant: g * answer.first, second_moment: g * g * answer.second },
            gradient: gradient.then(|| Gradient { m: answer.m, r: answer.r, b: answer.b.as_slice().to_vec() }),
            // Moments are bounded functions of scores of unit scale: a variance that is left out is worth no more than half of it.
            error_estimate: 0.5 * answer.dropped,
            gradient_error_estimate: 0.0,
        })
    }

    /// bayes-softmax of a rank beyond product grids.
    fn by_quasi_monte_carlo(&self, place: &Place, gradient: bool, budget: &Budget) -> Evaluation {
        // Steps in t need not be finer than what sampling reaches.
        let precision = self.precision(MARGIN - self.tolerance.max(1e-8).ln());
        if self.signals.count(&place.m, precision, true).is_none()
            || self.task.length() as f64 * POINTS_PER_TOKEN > LAST_POINTS as f64
        {
            return self.nothing(gradient);
        }
        let mut points = FIRST_POINTS;
        let mut found = self.nothing(gradient);
        loop {
            let before = budget.spent();
            let of = |s| self.shared_at(place, precision, gradient, &Rule::QuasiRandom(points, s), budget);
            let Some(all) = budgeted(budget, || (0..SCRAMBLES).map(of).collect::<Option<Vec<Evaluation>>>()) else {
                return found;
            };
            let errors = |pick: &dyn Fn(&Evaluation) -> Vec<f64>| -> f64 {
                let rows: Vec<Vec<f64>> = all.iter().map(pick).collect();
                largest_size(
                    (0..rows[0].len()).map(|i| STANDARD_ERRORS * mean_and_error(rows.iter().map(|row| row[i])).1),
                )
            };
            let (loss, of_gradient) = (errors(&|e| e.numbers().0), errors(&|e| e.numbers().1));
            let mut mean = Evaluation::mean(&all).unwrap_or_else(|| all[0].clone());
            mean.error_estimate = loss;
            mean.gradient_error_estimate = of_gradient;
            found = mean;
            let error = larger(loss, of_gradient);
            if error <= self.tolerance || points >= LAST_POINTS {
                return found;
            }
            // At best, errors fall as points^-3/2. What cannot get there is not worth long work.
            let best = error * (points as f64 / LAST_POINTS as f64).powf(1.5);
            if !(best <= self.tolerance || 4.0 * (budget.spent() - before) as f64 <= HOPELESS_OPERATIONS) {
                return found;
            }
            points *= 4;
        }
    }
}

/// The evaluation with its numbers in their ranges, where they are off by no more than their error: attention and its square are
/// positive, and the loss, `E |a - 1{l = eps}|^2`, is.
fn in_range(mut evaluation: Evaluation) -> Evaluation {
    let error = evaluation.error_estimate;
    let Loss { attention_on_relevant: first, second_moment: second } = &mut evaluation.loss;
    if *first < 0.0 && -*first <= error {
        *first = 0.0;
    }
    let least = (2.0 * *first - 1.0).max(0.0);
    if *second < least && least - *second <= 2.0 * error {
        *second = least;
    }
    evaluation
}

/// Refuses a tolerance that is no number between the tightest and the loosest.
///
/// # Errors
/// Says what the limits are.
pub fn check_tolerance(tolerance: f64) -> Result<(), Error> {
    if (TIGHTEST..=LOOSEST).contains(&tolerance) {
        return Ok(());
    }
    Err(Error::invalid("tolerance", format!("{tolerance} is not between {TIGHTEST:e} and {LOOSEST:e}")))
}

impl Evaluator for Quadrature {
    fn task(&self) -> &Task {
        &self.task
    }

    fn heads(&self) -> usize {
        self.heads
    }

    fn attention(&self) -> &Attention {
        &self.attention
    }

    fn gives_noise(&self) -> bool {
        false
    }

    fn moments(&self, at: &Coordinates) -> Moments {
        self.moments_watched(at, &Unwatched)
    }

    fn loss(&self, at: &Coordinates) -> Loss {
        self.evaluate(at, false).loss
    }

    fn moments_watched(&self, at: &Coordinates, watch: &dyn Watch) -> Moments {
        let evaluation = self.evaluate_watched(at, true, watch);
        let gradient = evaluation.gradient.unwrap_or_else(|| self.no_gradient());
        // r = m m^T + C C^T.
        Moments {
            loss: evaluation.loss,
            gx: gradient.m + &gradient.r * &at.m * 2.0,
            gc: &gradient.r * &at.c * 2.0,
            gb: gradient.b,
            gg: None,
        }
    }

    fn loss_watched(&self, at: &Coordinates, watch: &dyn Watch) -> Loss {
        self.evaluate_watched(at, false, watch).loss
    }
}
