//! Whether a flow has come to its end, or only to a slow passage (`theory/README.md` section 13.5).
//!
//! At a state `y = (m, r, b)` of the flow `dy/dtau = v(y)`, reached at the time `tau`, with
//! `omega = 2 (1 - 1/L) / (H L)` the unit of rates and `Lambda = E[theta theta^T]`, the flow has **settled** when
//!
//! ```text
//! drift     |v_i| <= tolerance omega                             every m, r and trained b
//!           |v_i| <= min(tolerance omega, MOTION sqrt(Lambda_ff) / tau)        every m_hf
//! growth    kappa <= max(PRECISION omega, min(tolerance omega, ln(VISIBLE) / (HORIZON tau)))
//! ```
//!
//! where `kappa` is the largest real part among the eigenvalues of `J = dv/dy`, noise of SGD included. The drift says that
//! nothing moves: in as long again, at the present pace, no alignment moves by more than [`MOTION`] of a
//! matched filter's. A slow passage near a saddle has that too; the growth tells it: no perturbation, also one that the
//! symmetry of the start forbids, grows by more than [`VISIBLE`] in [`HORIZON`] times as long as the flow has run. At a drift above
//! its limit rates mean nothing and are not computed.
//!
//! `J` is formed by differences, in coordinates in which every small step is a possible state. Gradient flow: `(m, C, b)`, where the columns
//! of `C` that are empty have one block of `J`, so one of them stands for all. With noise: `(m, A, b)` with
//! `r - m m^T = l (1 + A) l^T`, `A` symmetric and `l l^T = r - m m^T + FLOOR^2` at the state. A rate of `A`
//! is that of an overlap, twice that of its keys.

use headflow_model::{Bias, Watch, biases, larger, largest, largest_size, lower_factor};
use nalgebra::linalg::{Schur, balancing::balance_parlett_reinsch};
use nalgebra::{DMatrix, DVector};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::flow::{Solution, derivative_at, gradient_flow};
use crate::moments::{Coordinates, Evaluator};
use crate::stability::unit_of_rates;

/// How far an alignment may move in as long again, as a fraction of `sqrt(Lambda_ff)`.
pub const MOTION: f64 = 0.1;

/// Growth by this factor shows.
pub const VISIBLE: f64 = 10.0;

/// No growth may show within so many times the time that the flow has run.
pub const HORIZON: f64 = 10.0;

/// Rates below this, in the unit of rates, are errors of the differences.
pub const PRECISION: f64 = 1e-4;

/// Step of the differences: their error is about this, relative to the unit of rates.
const STEP: f64 = 1e-4;

/// Columns of `C` shorter than this are empty: what they do to `J` is of second order in them.
const EMPTY: f64 = 1e-3;

/// Keys outside the spikes shorter than this are held at it when the noise fills them.
const FLOOR: f64 = 1e-4;

/// The most coordinates of a Jacobian: beyond, the growth is not known.
const MAX_COORDINATES: usize = 1000;

/// What is known of a state at which a flow ended ([the definition](self)).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settled {
    /// Whether it is an end.
    pub settled: bool,
    /// The derivative, per unit of `tau`, that is largest against its limit; absent when it is not finite.
    pub drift: Option<f64>,
    /// What has it, as `m[0][1]`.
    pub component: String,
    /// Its limit.
    pub drift_limit: f64,
    /// The largest rate of growth, per unit of `tau`; absent where the drift is above its limit, or when it is not known (more than
    /// 1000 coordinates, or no convergence).
    pub growth_rate: Option<f64>,
    /// Its limit.
    pub growth_limit: f64,
    /// The time `tau` of the state.
    pub time: f64,
}

impl Settled {
    /// Whether the drift is within its limit.
    pub fn rests(&self) -> bool {
        self.drift.is_some_and(|drift| drift <= self.drift_limit)
    }

    /// One line for a person.
    pub fn describe(&self) -> String {
        let time = crate::stages::number(self.time);
        let Some(drift) = self.drift else {
            return format!("not settled at tau = {time}: d{}/dtau is not finite", self.component);
        };
        if !self.rests() {
            return format!(
                "not settled at tau = {time}: d{}/dtau = {drift:.1e} still, above {:.1e}",
                self.component, self.drift_limit
            );
        }
        match self.growth_rate {
            Some(rate) if self.settled => {
                format!("settled at tau = {time}: drift {drift:.1e}, largest growth rate {rate:+.1e}")
            }
            Some(rate) => format!(
                "not settled at tau = {time}: a slow passage, growth rate {rate:+.1e} left, above {:.1e} (drift {drift:.1e})",
                self.growth_limit
            ),
            None => format!("not known to be settled at tau = {time}: drift {drift:.1e}, growth not computed"),
        }
    }

    /// The worse of two: what several flows have in common.
    fn worse(self, other: Self) -> Self {
        let badness = |s: &Self| {
            let drift = s.drift.map_or(f64::INFINITY, |drift| drift / s.drift_limit);
            let growth = s.growth_rate.unwrap_or(f64::INFINITY);
            (u8::from(!s.settled), u8::from(!s.rests()), if s.rests() { growth } else { drift })
        };
        if badness(&other).partial_cmp(&badness(&self)) == Some(std::cmp::Ordering::Greater) { other } else { self }
    }
}

/// Looks at the state `at` that a flow with `noise = gamma / B` has at `time`; `tolerance` in units of
/// [`unit_of_rates`].
pub fn settled<E: Evaluator>(
    evaluator: &E,
    at: &Coordinates,
    noise: f64,
    time: f64,
    tolerance: f64,
    watch: &dyn Watch,
) -> Settled {
    let unit = unit_of_rates(evaluator);
    let (heads, features) = at.m.shape();
    let second = evaluator.task().theta().second_moment();
    let (dm, dr, db) = derivative_at(evaluator, at, &at.r(), noise);
    let everywhere = tolerance * unit;
    let of_alignments = |f: usize| match MOTION * second[(f, f)].sqrt() / time {
        limit if second[(f, f)] > 0.0 && limit < everywhere => limit,
        _ => everywhere,
    };
    let m = (0..heads).flat_map(|h| (0..features).map(move |f| (h, f)));
    let r = (0..heads).flat_map(|h| (0..=h).map(move |k| (h, k)));
    let all: Vec<(String, f64, f64)> = m
        .map(|(h, f)| (format!("m[{h}][{f}]"), dm[(h, f)], of_alignments(f)))
        .chain(r.map(|(h, k)| (format!("r[{h}][{k}]"), dr[(h, k)], everywhere)))
        .chain(db.iter().enumerate().map(|(h, &d)| (format!("b[{h}]"), d, everywhere)))
        .collect();
    // A derivative that is not a number is the worst of all.
    let ratio = |entry: &(String, f64, f64)| if entry.1.is_finite() { entry.1.abs() / entry.2 } else { f64::INFINITY };
    let worst = all.into_iter().max_by(|a, b| ratio(a).total_cmp(&ratio(b))).unwrap_or_default();
    let rests = worst.1.abs() <= worst.2;
    let growth_limit = everywhere.min(VISIBLE.ln() / (HORIZON * time)).max(PRECISION * unit);
    let growth_rate = if rests { growth(evaluator, at, noise, watch) } else { None };
    Settled {
        settled: rests && growth_rate.is_some_and(|rate| rate <= growth_limit),
        drift: Some(worst.1.abs()).filter(|d| d.is_finite()),
        component: worst.0,
        drift_limit: worst.2,
        growth_rate,
        growth_limit,
        time,
    }
}

/// Looks at the ends of flows, each with its evaluator: the least settled speaks for all. `None` where one has no end.
pub fn of_flows<E: Evaluator>(
    evaluators: &[E],
    solutions: &[Solution],
    noise: f64,
    tolerance: f64,
    watch: &dyn Watch,
) -> Option<Settled> {
    let each: Option<Vec<Settled>> = evaluators
        .par_iter()
        .zip(solutions)
        .map(|(evaluator, solution)| {
            let (time, at) = solution.end.as_ref()?;
            Some(settled(evaluator, at, noise, *time, tolerance, watch))
        })
        .collect();
    each?.into_iter().reduce(Settled::worse)
}

/// The largest real part among the eigenvalues of `J` at a state, for a flow with `noise`.
fn growth<E: Evaluator>(evaluator: &E, at: &Coordinates, noise: f64, watch: &dyn Watch) -> Option<f64> {
    let columns = if noise > 0.0 {
        let steps = Noisy::at(evaluator, at, noise)?;
        differences(steps.size(), &|u| steps.drift(u), watch)?
    } else {
        let steps = Gradient::at(evaluator, at);
        let j = differences(steps.size(), &|u| steps.drift(u), watch)?;
        (&j + j.transpose()) * 0.5
    };
    if noise == 0.0 {
        return Some(largest(columns.symmetric_eigenvalues().iter())).filter(|rate| rate.is_finite());
    }
    let mut balanced = columns;
    balance_parlett_reinsch(&mut balanced);
    let rounds = 100 * balanced.nrows();
    let rates = Schur::try_new(balanced, f64::EPSILON, rounds)?.complex_eigenvalues();
    Some(rates.iter().fold(f64::NEG_INFINITY, |a, rate| larger(a, rate.re))).filter(|rate| rate.is_finite())
}

/// The Jacobian of a drift at 0, by forward differences.
fn differences(
    size: usize,
    drift: &(dyn Fn(&DVector<f64>) -> Option<DVector<f64>> + Sync),
    watch: &dyn Watch,
) -> Option<DMatrix<f64>> {
    if size > MAX_COORDINATES {
        return None;
    }
    let here = drift(&DVector::zeros(size))?;
    let columns: Option<Vec<DVector<f64>>> = (0..size)
        .into_par_iter()
        .map(|i| {
            if watch.interrupted() {
                return None;
            }
            let mut u = DVector::zeros(size);
            u[i] = STEP;
            Some((drift(&u)? - &here) / STEP)
        })
        .collect();
    let jacobian = DMatrix::from_columns(&columns?);
    largest_size(jacobian.iter()).is_finite().then_some(jacobian)
}

/// Small steps of `(m, C, b)` about a state of gradient flow.
struct Gradient<'a, E> {
    evaluator: &'a E,
    at: &'a Coordinates,
    /// The columns of `C` that move.
    columns: Vec<usize>,
}

impl<'a, E: Evaluator> Gradient<'a, E> {
    fn at(evaluator: &'a E, at: &'a Coordinates) -> Self {
        let (full, empty): (Vec<usize>, Vec<usize>) =
            (0..at.c.ncols()).partition(|&j| !(at.c.column(j).norm() <= EMPTY));
        Self { evaluator, at, columns: full.into_iter().chain(empty.into_iter().take(1)).collect() }
    }

    fn trained(&self) -> bool {
        self.evaluator.attention().bias == Bias::Trained
    }

    fn size(&self) -> usize {
        self.at.m.nrows() * (self.at.m.ncols() + self.columns.len() + usize::from(self.trained()))
    }

    fn drift(&self, u: &DVector<f64>) -> Option<DVector<f64>> {
        let mut moved = self.at.clone();
        let mut rest = u.iter();
        let mut next = || rest.next().copied().unwrap_or(0.0);
        moved.m.iter_mut().for_each(|v| *v += next());
        for &j in &self.columns {
            moved.c.column_mut(j).iter_mut().for_each(|v| *v += next());
        }
        if self.trained() {
            moved.b.iter_mut().for_each(|v| *v += next());
        } else {
            moved.b = biases(self.evaluator.attention().bias, &moved.r(), &moved.b);
        }
        let (dm, dc, db) = gradient_flow(self.evaluator, &moved);
        let columns = self.columns.iter().flat_map(|&j| dc.column(j).iter().copied().collect::<Vec<_>>());
        let b = db.iter().copied().filter(|_| self.trained());
        Some(DVector::from_iterator(self.size(), dm.iter().copied().chain(columns).chain(b)))
    }
}

/// Small steps of `(m, A, b)` about a state of a flow with noise.
struct Noisy<'a, E> {
    evaluator: &'a E,
    at: &'a Coordinates,
    noise: f64,
    /// `l`.
    factor: DMatrix<f64>,
}

impl<'a, E: Evaluator> Noisy<'a, E> {
    fn at(evaluator: &'a E, at: &'a Coordinates, noise: f64) -> Option<Self> {
        let mut residual = &at.c * at.c.transpose();
        (0..residual.nrows()).for_each(|h| residual[(h, h)] += FLOOR * FLOOR);
        Some(Self { evaluator, at, noise, factor: lower_factor(&residual, 0.0).ok()? })
    }

    fn trained(&self) -> bool {
        self.evaluator.attention().bias == Bias::Trained
    }

    fn size(&self) -> usize {
        let (heads, features) = self.at.m.shape();
        heads * features + heads * (heads + 1) / 2 + if self.trained() { heads } else { 0 }
    }

    fn drift(&self, u: &DVector<f64>) -> Option<DVector<f64>> {
        let heads = self.at.m.nrows();
        let mut moved = self.at.clone();
        let mut rest = u.iter();
        let mut next = || rest.next().copied().unwrap_or(0.0);
        moved.m.iter_mut().for_each(|v| *v += next());
        let mut a = DMatrix::identity(heads, heads);
        for h in 0..heads {
            for k in 0..=h {
                let step = next();
                a[(h, k)] += step;
                if h != k {
                    a[(k, h)] += step;
                }
            }
        }
        moved.c = &self.factor * lower_factor(&a, 0.0).ok()?;
        let r = moved.r();
        if self.trained() {
            moved.b.iter_mut().for_each(|v| *v += next());
        } else {
            moved.b = biases(self.evaluator.attention().bias, &r, &moved.b);
        }
        let (dm, dr, db) = derivative_at(self.evaluator, &moved, &r, self.noise);
        let ds = dr - &dm * moved.m.transpose() - &moved.m * dm.transpose();
        let half = self.factor.solve_lower_triangular(&ds)?;
        let da = self.factor.solve_lower_triangular(&half.transpose())?;
        let lower = (0..heads).flat_map(|h| (0..=h).map(move |k| (h, k))).map(|place| da[place]);
        let b = db.iter().copied().filter(|_| self.trained());
        Some(DVector::from_iterator(self.size(), dm.iter().copied().chain(lower).chain(b)))
    }
}
