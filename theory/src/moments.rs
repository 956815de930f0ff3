//! What the flow needs to know about the data: moments at given keys (`theory/README.md`, sections 3 to 5).
//!
//! In the coordinates `k_h = sum_f m_hf k*_f + sum_j C_hj e_j`, the scores are
//!
//! ```text
//! s_hl = sum_f m_hf x_fl + sum_j C_hj c_jl + b_h
//! ```
//!
//! with `x_fl = k*_f . X_l` (standard normal, plus `theta_f` on the relevant token) and
//! `c ~ N(0, 1)`. By exchangeability the relevant token is token 0. With
//! `d_l = a_l - 1{l = eps}` the population loss is `E |d|^2`, and `g_hl` its derivative with
//! respect to `s_hl` on one sample.

use headflow_model::{Attention, Either, Error, OrderParameters, Task, Unwatched, Watch, biases};
use nalgebra::DMatrix;

/// A point of the flow: the keys' coordinates and their biases.
#[derive(Debug, Clone, PartialEq)]
pub struct Coordinates {
    /// Alignments `m`, `H x F`.
    pub m: DMatrix<f64>,
    /// Coordinates outside the spikes, `H x H`, any `C` with `C C^T = r - m m^T`.
    pub c: DMatrix<f64>,
    /// Biases that enter the scores, length `H`.
    pub b: Vec<f64>,
}

impl Coordinates {
    /// The coordinates of order parameters under an attention's bias rule, with lower-triangular `C`.
    pub fn of(point: &OrderParameters, attention: &Attention) -> Self {
        Self { m: point.m().clone(), c: point.residual_factor(), b: biases(attention.bias, point.r(), point.b()) }
    }

    /// The biases, those far beyond the scores brought near: see [`Attention::bring_near`].
    pub fn near_biases(&self, attention: &Attention) -> Vec<f64> {
        let mut b = self.b.clone();
        attention.bring_near(&mut b, |h| self.m.row(h).norm_squared() + self.c.row(h).norm_squared());
        b
    }

    /// The overlaps `r = m m^T + C C^T`.
    pub fn r(&self) -> DMatrix<f64> {
        &self.m * self.m.transpose() + &self.c * self.c.transpose()
    }
}

/// The population loss and its two parts.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Loss {
    /// `E[a_eps]`, the mean attention on the relevant token.
    pub attention_on_relevant: f64,
    /// `E[sum_l a_l^2]`.
    pub second_moment: f64,
}

impl Loss {
    /// No loss: both parts are NaN.
    pub const NONE: Self = Self { attention_on_relevant: f64::NAN, second_moment: f64::NAN };

    /// `E = 1 - 2 E[a_eps] + E[sum_l a_l^2]`.
    pub fn value(&self) -> f64 {
        1.0 - 2.0 * self.attention_on_relevant + self.second_moment
    }
}

/// The moments that drive the flow.
#[derive(Debug, Clone, PartialEq)]
pub struct Moments {
    /// The loss.
    pub loss: Loss,
    /// `E[sum_l g_hl x_fl]`, `H x F`.
    pub gx: DMatrix<f64>,
    /// `E[sum_l g_hl c_jl]`, `H x H`.
    pub gc: DMatrix<f64>,
    /// `E[sum_l g_hl]`, length `H`.
    pub gb: Vec<f64>,
    /// `E[sum_l g_hl g_h'l]`, `H x H`, from evaluators that give it: the noise of SGD.
    pub gg: Option<DMatrix<f64>>,
}

impl Moments {
    /// No moments: all are NaN.
    pub fn none(heads: usize, features: usize) -> Self {
        Self {
            loss: Loss::NONE,
            gx: DMatrix::from_element(heads, features, f64::NAN),
            gc: DMatrix::from_element(heads, heads, f64::NAN),
            gb: vec![f64::NAN; heads],
            gg: Some(DMatrix::from_element(heads, heads, f64::NAN)),
        }
    }
}

/// A way to compute population averages.
///
/// An evaluator is a deterministic function of its argument: the flow and its derivatives see a
/// smooth right-hand side. Averages of many heads take long; [`Watched`] makes any evaluator stop on the way when it is
/// asked to.
pub trait Evaluator: Sync {
    /// The task that is averaged over.
    fn task(&self) -> &Task;

    /// Number of heads `H`.
    fn heads(&self) -> usize;

    /// The attention.
    fn attention(&self) -> &Attention;

    /// Whether the moments hold `gg`, without which there is no flow with `gamma > 0`. A wrapper passes on what
    /// it wraps; one that claims noise and gives none has no flow with `gamma > 0` all the same, only later: its
    /// derivative is NaN.
    fn gives_noise(&self) -> bool {
        true
    }

    /// Loss and moments at a point.
    fn moments(&self, at: &Coordinates) -> Moments;

    /// The loss alone.
    fn loss(&self, at: &Coordinates) -> Loss;

    /// [`Evaluator::moments`], but soon and all NaN once `watch` interrupts.
    fn moments_watched(&self, at: &Coordinates, watch: &dyn Watch) -> Moments {
        if watch.interrupted() { Moments::none(self.heads(), self.task().features()) } else { self.moments(at) }
    }

    /// [`Evaluator::loss`], but soon and NaN once `watch` interrupts.
    fn loss_watched(&self, at: &Coordinates, watch: &dyn Watch) -> Loss {
        if watch.interrupted() { Loss::NONE } else { self.loss(at) }
    }

    /// Whether its averages are NaN because somebody asked it to stop: look here first when one is.
    fn interrupted(&self) -> bool {
        false
    }
}

/// An evaluator that stops when its watch asks it to: averages are then NaN, and [`Evaluator::interrupted`] tells why.
#[derive(Clone, Copy)]
pub struct Watched<'a, E: ?Sized> {
    evaluator: &'a E,
    watch: &'a dyn Watch,
}

impl<'a, E: Evaluator + ?Sized> Watched<'a, E> {
    /// `evaluator` under `watch`.
    pub fn new(evaluator: &'a E, watch: &'a dyn Watch) -> Self {
        Self { evaluator, watch }
    }
}

impl<'a, E: Evaluator> Watched<'a, E> {
    /// Each of `evaluators` under `watch`.
    pub fn all(evaluators: &'a [E], watch: &'a dyn Watch) -> Vec<Self> {
        evaluators.iter().map(|evaluator| Self::new(evaluator, watch)).collect()
    }
}

impl<E: Evaluator + ?Sized> Evaluator for Watched<'_, E> {
    fn task(&self) -> &Task {
        self.evaluator.task()
    }

    fn heads(&self) -> usize {
        self.evaluator.heads()
    }

    fn attention(&self) -> &Attention {
        self.evaluator.attention()
    }

    fn gives_noise(&self) -> bool {
        self.evaluator.gives_noise()
    }

    fn moments(&self, at: &Coordinates) -> Moments {
        self.evaluator.moments_watched(at, self.watch)
    }

    fn loss(&self, at: &Coordinates) -> Loss {
        self.evaluator.loss_watched(at, self.watch)
    }

    fn moments_watched(&self, at: &Coordinates, watch: &dyn Watch) -> Moments {
        self.evaluator.moments_watched(at, &Either(self.watch, watch))
    }

    fn loss_watched(&self, at: &Coordinates, watch: &dyn Watch) -> Loss {
        self.evaluator.loss_watched(at, &Either(self.watch, watch))
    }

    fn interrupted(&self) -> bool {
        self.watch.interrupted() || self.evaluator.interrupted()
    }
}

/// Refuses a noise `gamma / B` that is no number from 0 on, and one above 0 of an evaluator whose moments do not
/// hold the noise of SGD: everything that follows a flow with noise asks this first.
///
/// # Errors
/// [`Error::Invalid`] for `gamma` or for `evaluator`.
pub fn check_noise<E: Evaluator>(evaluator: &E, noise: f64) -> Result<(), Error> {
    if !(noise.is_finite() && noise >= 0.0) {
        return Err(Error::invalid("gamma", format!("gamma / batch must be finite and not negative, got {noise}")));
    }
    if noise > 0.0 && !evaluator.gives_noise() {
        return Err(Error::invalid(
            "evaluator",
            "quadrature gives the loss and its gradient, not the noise of SGD that gamma > 0 needs: use gamma 0, or evaluator qmc",
        ));
    }
    Ok(())
}

/// The average of several evaluators, an evaluator itself.
#[derive(Debug, Clone, Copy)]
pub struct Mean<'a, E> {
    first: &'a E,
    all: &'a [E],
}

impl<'a, E: Evaluator> Mean<'a, E> {
    /// The average over `all`.
    ///
    /// # Errors
    /// When there is none.
    pub fn new(all: &'a [E]) -> Result<Self, Error> {
        let first = all.first().ok_or_else(|| Error::invalid("scrambles", "there must be at least one"))?;
        Ok(Self { first, all })
    }
}

impl<E: Evaluator> Evaluator for Mean<'_, E> {
    fn task(&self) -> &Task {
        self.first.task()
    }

    fn heads(&self) -> usize {
        self.first.heads()
    }

    fn attention(&self) -> &Attention {
        self.first.attention()
    }

    fn gives_noise(&self) -> bool {
        self.all.iter().all(Evaluator::gives_noise)
    }

    fn moments(&self, at: &Coordinates) -> Moments {
        self.moments_watched(at, &Unwatched)
    }

    fn loss(&self, at: &Coordinates) -> Loss {
        self.loss_watched(at, &Unwatched)
    }

    fn moments_watched(&self, at: &Coordinates, watch: &dyn Watch) -> Moments {
        let mut sum = self.first.moments_watched(at, watch);
        for other in &self.all[1..] {
            let moments = other.moments_watched(at, watch);
            sum.loss.attention_on_relevant += moments.loss.attention_on_relevant;
            sum.loss.second_moment += moments.loss.second_moment;
            sum.gx += moments.gx;
            sum.gc += moments.gc;
            // Of some evaluators alone it would be no average.
            sum.gg = sum.gg.zip(moments.gg).map(|(sum, gg)| sum + gg);
            sum.gb.iter_mut().zip(moments.gb).for_each(|(s, g)| *s += g);
        }
        let scale = 1.0 / self.all.len() as f64;
        sum.loss.attention_on_relevant *= scale;
        sum.loss.second_moment *= scale;
        sum.gx *= scale;
        sum.gc *= scale;
        if let Some(gg) = &mut sum.gg {
            *gg *= scale;
        }
        sum.gb.iter_mut().for_each(|g| *g *= scale);
        sum
    }

    fn loss_watched(&self, at: &Coordinates, watch: &dyn Watch) -> Loss {
        let mut sum = Loss::default();
        for evaluator in self.all {
            let loss = evaluator.loss_watched(at, watch);
            sum.attention_on_relevant += loss.attention_on_relevant;
            sum.second_moment += loss.second_moment;
        }
        let scale = 1.0 / self.all.len() as f64;
        Loss { attention_on_relevant: sum.attention_on_relevant * scale, second_moment: sum.second_moment * scale }
    }

    fn interrupted(&self) -> bool {
        self.all.iter().any(E::interrupted)
    }
}
