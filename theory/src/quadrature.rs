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

use headflow_model::{Activation, Attention, Error, Task, Unwatched, Watch, mean_and_error};
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
const PREFACTORS: [f64; 2] = [100.0, 1000.0];

/// Added to `Lambda` where the gradient is wanted too.
const MORE_FOR_GRADIENT: f64 = 2.5;

/// Rounding of a sum of many terms.
const ROUNDING: f64 = 5e-14;

/// Most multiplications of one evaluation, and most points `(t, t')` of a pair, or of a score (some are held at once).
const MOST_WORK: f64 = 4e10;
const MOST_POINTS: f64 = 6e6;

/// Keys from this size on have their work counted before it is done.
const COUNTED: f64 = 6.0;

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
        let largest = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
        let ((a, ga), (b, gb)) = (self.numbers(), other.numbers());
        [largest(&a, &b), largest(&ga, &gb)]
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
            (SAFETY * differences[i].powf(ratio)).min(differences[i]).max(PREFACTORS[i] * (-lambda).exp())
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
        if found[0].max(found[1]) <= tolerance {
            break;
        }
        lambda *= FINER;
        ratio = FINER;
    }
    errors.map(|errors| (finest, errors))
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
        self.met(self.evaluate(at, false))
    }

    /// The loss and its gradient, to the tolerance.
    ///
    /// # Errors
    /// As [`Quadrature::loss_to_tolerance`].
    pub fn gradient_to_tolerance(&self, at: &Coordinates) -> Result<Evaluation, Error> {
        self.met(self.evaluate(at, true))
    }

    /// The moments of all heads and pairs at a point, the best that can be had; none for bayes-softmax, whose heads are
    /// normalised against each other.
    pub fn head_moments(&self, at: &Coordinates) -> Option<HeadMoments> {
        if self.attention.activation == Activation::BayesSoftmax {
            return None;
        }
        let (r, heads) = (at.r(), self.heads);
        let of = |lambda| {
            let parts = self.contributions(at, &r, self.precision(lambda), false, &Unwatched)?;
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
            let first = a.0.iter().zip(&b.0).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
            [first, (&a.1 - &b.1).amax()]
        };
        let ((relevant, products), errors) = refined(self.tolerance, of, distance)?;
        let error_estimate = errors[0].max(errors[1]) + ROUNDING;
        Some(HeadMoments { relevant, products, error_estimate, attention: self.attention })
    }

    fn met(&self, evaluation: Evaluation) -> Result<Evaluation, Error> {
        let reached = evaluation.error_estimate.max(evaluation.gradient_error_estimate);
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
    pub fn evaluate(&self, at: &Coordinates, gradient: bool) -> Evaluation {
        self.evaluate_watched(at, gradient, &Unwatched)
    }

    /// [`Quadrature::evaluate`], but soon and all NaN once `watch` interrupts.
    pub fn evaluate_watched(&self, at: &Coordinates, gradient: bool, watch: &dyn Watch) -> Evaluation {
        let evaluation = self.best(at, gradient, watch);
        if watch.interrupted() {
            // Broken off: no evaluation, and no error of one.
            return self.nothing(gradient);
        }
        let worst = evaluation.error_estimate.max(evaluation.gradient_error_estimate);
        self.worst.fetch_max(worst.to_bits(), Ordering::Relaxed);
        evaluation
    }

    fn best(&self, at: &Coordinates, gradient: bool, watch: &dyn Watch) -> Evaluation {
        assert_eq!(at.m.shape(), (self.heads, self.task.features()), "m does not fit");
        assert_eq!(at.b.len(), self.heads, "b does not fit");
        let r = at.r();
        let refined =
            refined(self.tolerance, |lambda| self.at_precision(at, &r, lambda, gradient, watch), Evaluation::distance);
        if let Some((mut evaluation, [loss, of_gradient])) = refined {
            let rounding = ROUNDING * (1.0 + evaluation.loss.second_moment);
            evaluation.error_estimate = loss + rounding;
            evaluation.gradient_error_estimate = if gradient { of_gradient + rounding } else { 0.0 };
            return evaluation;
        }
        if self.attention.activation == Activation::BayesSoftmax {
            return self.by_quasi_monte_carlo(at, &r, gradient, watch);
        }
        self.nothing(gradient)
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

    /// One evaluation with steps for an error `e^-lambda`; none where it would take too much work, or `watch` interrupts it.
    fn at_precision(
        &self,
        at: &Coordinates,
        r: &DMatrix<f64>,
        lambda: f64,
        gradient: bool,
        watch: &dyn Watch,
    ) -> Option<Evaluation> {
        let lambda = if gradient { lambda + MORE_FOR_GRADIENT } else { lambda };
        let shared = self.attention.activation == Activation::BayesSoftmax;
        if self.signals.too_many(&at.m, self.precision(lambda), shared) {
            return None;
        }
        match self.attention.activation {
            Activation::BayesSoftmax => self.shared_at(at, r, self.precision(lambda), gradient, &Rule::Tensor, watch),
            _ => self.pairs_at(at, r, self.precision(lambda), gradient, watch),
        }
    }

    /// What each head and each pair contributes; none where that would take too much work, or `watch` interrupts it.
    fn contributions(
        &self,
        at: &Coordinates,
        r: &DMatrix<f64>,
        precision: Precision,
        gradient: bool,
        watch: &dyn Watch,
    ) -> Option<Vec<Contribution>> {
        let (g, heads) = (self.attention.gain(self.heads), self.heads);
        let leak = self.attention.activation == Activation::Softmax1;
        // A pair stands for both of its orders.
        let ask = |second: f64| pairs::Question {
            m: &at.m,
            r,
            b: &at.b,
            signals: &self.signals,
            precision,
            leak,
            weights: [-2.0 * g, second * g * g],
            gradient,
            watch,
        };
        let tasks: Vec<[usize; 2]> = (0..heads).flat_map(|h| (0..=h).map(move |k| [h, k])).collect();
        let question = ask(2.0);
        let mut work = 0.0;
        // Keys of ordinary size never come near the bounds.
        let counted = if r.diagonal().max() > COUNTED * COUNTED { &tasks[..] } else { &[] };
        for &[h, k] in counted {
            if watch.interrupted() {
                return None;
            }
            let (own, points) = if h == k { pairs::single_work(&question, h) } else { pairs::work(&question, h, k) };
            work += own;
            if work > MOST_WORK || points > MOST_POINTS {
                return None;
            }
        }
        let parts = tasks
            .par_iter()
            .map(|&[h, k]| if h == k { pairs::single(&ask(1.0), h) } else { pairs::pair(&question, h, k) })
            .collect();
        (!watch.interrupted()).then_some(parts)
    }

    fn pairs_at(
        &self,
        at: &Coordinates,
        r: &DMatrix<f64>,
        precision: Precision,
        gradient: bool,
        watch: &dyn Watch,
    ) -> Option<Evaluation> {
        let (g, heads) = (self.attention.gain(self.heads), self.heads);
        let parts = self.contributions(at, r, precision, gradient, watch)?;
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
        Some(Evaluation {
            loss,
            gradient: gradient.then_some(sum),
            error_estimate: f64::NAN,
            gradient_error_estimate: f64::NAN,
        })
    }

    fn shared_at(
        &self,
        at: &Coordinates,
        r: &DMatrix<f64>,
        precision: Precision,
        gradient: bool,
        rule: &Rule,
        watch: &dyn Watch,
    ) -> Option<Evaluation> {
        let g = self.attention.gain(self.heads);
        let components = self.signals.components(&at.m, precision);
        let question = shared::Question {
            m: &at.m,
            r,
            b: &at.b,
            components: &components,
            covariance: self.signals.covariance.as_ref(),
            precision,
            weights: [-2.0 * g, g * g],
            gradient,
            watch,
        };
        let answer = shared::evaluate(&question, rule)?;
        Some(Evaluation {
            loss: Loss { attention_on_relevant: g * answer.first, second_moment: g * g * answer.second },
            gradient: gradient.then(|| Gradient { m: answer.m, r: answer.r, b: answer.b.as_slice().to_vec() }),
            error_estimate: f64::NAN,
            gradient_error_estimate: f64::NAN,
        })
    }

    /// bayes-softmax of a rank beyond product grids.
    fn by_quasi_monte_carlo(
        &self,
        at: &Coordinates,
        r: &DMatrix<f64>,
        gradient: bool,
        watch: &dyn Watch,
    ) -> Evaluation {
        // Steps in t need not be finer than what sampling reaches.
        let precision = self.precision(MARGIN - self.tolerance.max(1e-8).ln());
        if self.signals.too_many(&at.m, precision, true) {
            return self.nothing(gradient);
        }
        let mut points = FIRST_POINTS;
        loop {
            let all: Vec<Evaluation> = (0..SCRAMBLES)
                .filter_map(|s| self.shared_at(at, r, precision, gradient, &Rule::QuasiRandom(points, s), watch))
                .collect();
            let few = self.task.length() as f64 * POINTS_PER_TOKEN > LAST_POINTS as f64;
            if all.len() < 2 || few {
                return self.nothing(gradient);
            }
            let errors = |pick: &dyn Fn(&Evaluation) -> Vec<f64>| -> f64 {
                let rows: Vec<Vec<f64>> = all.iter().map(pick).collect();
                (0..rows[0].len())
                    .map(|i| STANDARD_ERRORS * mean_and_error(rows.iter().map(|row| row[i])).1)
                    .fold(0.0, f64::max)
            };
            let (loss, of_gradient) = (errors(&|e| e.numbers().0), errors(&|e| e.numbers().1));
            if loss.max(of_gradient) <= self.tolerance || points >= LAST_POINTS {
                let mut mean = Evaluation::mean(&all).unwrap_or_else(|| all[0].clone());
                mean.error_estimate = loss;
                mean.gradient_error_estimate = of_gradient;
                return mean;
            }
            points *= 4;
        }
    }
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
