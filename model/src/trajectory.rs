//! Trajectories of the order parameters and the loss on a time grid, and their averages.
//!
//! Both routes to a trajectory, the flow and the simulation, speak this language; files, figures
//! and the verdict read it.

use nalgebra::DMatrix;

use crate::extremes::largest_size;

/// One scalar of a trajectory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Quantity {
    /// The loss.
    Loss,
    /// `m_hf`.
    Alignment {
        /// Head `h`.
        head: usize,
        /// Feature `f`.
        feature: usize,
    },
    /// `r_hh'`.
    Overlap {
        /// Head `h`.
        head: usize,
        /// Head `h'`.
        other: usize,
    },
    /// `b_h`.
    Bias {
        /// Head `h`.
        head: usize,
    },
}

/// Number of heads and features: what a trajectory's rows hold and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Number of heads `H`.
    pub heads: usize,
    /// Number of features `F`.
    pub features: usize,
}

impl Shape {
    /// Numbers per time: loss, `m` (`H F`), `r` (`H H`), `b` (`H`).
    pub fn width(self) -> usize {
        1 + self.heads * (self.features + self.heads + 1)
    }

    /// Every scalar, in the order in which a row holds them.
    pub fn quantities(self) -> impl Iterator<Item = Quantity> {
        let (heads, features) = (self.heads, self.features);
        std::iter::once(Quantity::Loss)
            .chain(
                (0..heads)
                    .flat_map(move |head| (0..features).map(move |feature| Quantity::Alignment { head, feature })),
            )
            .chain((0..heads).flat_map(move |head| (0..heads).map(move |other| Quantity::Overlap { head, other })))
            .chain((0..heads).map(|head| Quantity::Bias { head }))
    }

    /// Where a row holds `quantity`.
    pub fn index(self, quantity: Quantity) -> usize {
        let (h, f) = (self.heads, self.features);
        match quantity {
            Quantity::Loss => 0,
            Quantity::Alignment { head, feature } => 1 + head * f + feature,
            Quantity::Overlap { head, other } => 1 + h * f + head * h + other,
            Quantity::Bias { head } => 1 + h * (f + h) + head,
        }
    }

    /// A row from its parts.
    ///
    /// # Panics
    /// When the parts do not have this shape.
    pub fn row(self, loss: f64, m: &DMatrix<f64>, r: &DMatrix<f64>, b: &[f64]) -> Vec<f64> {
        assert_eq!(
            (m.shape(), r.shape(), b.len()),
            ((self.heads, self.features), (self.heads, self.heads), self.heads)
        );
        self.quantities()
            .map(|quantity| match quantity {
                Quantity::Loss => loss,
                Quantity::Alignment { head, feature } => m[(head, feature)],
                Quantity::Overlap { head, other } => r[(head, other)],
                Quantity::Bias { head } => b[head],
            })
            .collect()
    }
}

/// A path of the order parameters and the loss on a time grid.
#[derive(Debug, Clone, PartialEq)]
pub struct Trajectory {
    /// Heads and features.
    pub shape: Shape,
    /// Times `tau`, increasing.
    pub times: Vec<f64>,
    /// One row of [`Shape::width`] numbers per time.
    pub rows: Vec<Vec<f64>>,
}

impl Trajectory {
    /// A trajectory without times yet.
    pub fn new(shape: Shape) -> Self {
        Self { shape, times: Vec::new(), rows: Vec::new() }
    }

    /// The path of one scalar.
    pub fn path(&self, quantity: Quantity) -> impl Iterator<Item = f64> + '_ {
        let index = self.shape.index(quantity);
        self.rows.iter().map(move |row| row[index])
    }

    /// `tr r` at every time.
    pub fn trace(&self) -> Vec<f64> {
        let heads = self.shape.heads;
        self.rows
            .iter()
            .map(|row| (0..heads).map(|h| row[self.shape.index(Quantity::Overlap { head: h, other: h })]).sum())
            .collect()
    }

    /// The alignments at the time of index `t`, `H x F`.
    pub fn m(&self, t: usize) -> DMatrix<f64> {
        let Shape { heads, features } = self.shape;
        DMatrix::from_fn(heads, features, |head, feature| {
            self.rows[t][self.shape.index(Quantity::Alignment { head, feature })]
        })
    }

    /// The overlaps at the time of index `t`, `H x H`.
    pub fn r(&self, t: usize) -> DMatrix<f64> {
        let heads = self.shape.heads;
        DMatrix::from_fn(heads, heads, |head, other| self.rows[t][self.shape.index(Quantity::Overlap { head, other })])
    }

    /// The biases at the time of index `t`, length `H`.
    pub fn b(&self, t: usize) -> Vec<f64> {
        (0..self.shape.heads).map(|head| self.rows[t][self.shape.index(Quantity::Bias { head })]).collect()
    }

    /// Keeps the first `count` times.
    pub fn truncate(&mut self, count: usize) {
        self.times.truncate(count);
        self.rows.truncate(count);
    }
}

/// The mean of several trajectories with its standard error.
#[derive(Debug, Clone, PartialEq)]
pub struct Estimate {
    /// Mean over the trajectories, at the times that all of them reached.
    pub mean: Trajectory,
    /// Standard error of the mean (sample standard deviation over `sqrt(count)`); absent for one
    /// trajectory.
    pub standard_error: Option<Trajectory>,
    /// Number of trajectories.
    pub count: usize,
}

impl Estimate {
    /// Averages trajectories on one grid, up to the time that all of them reached.
    /// `None` without trajectories.
    pub fn over(trajectories: &[Trajectory]) -> Option<Self> {
        let first = trajectories.first()?;
        let times = trajectories.iter().map(|t| t.times.len()).min()?;
        let count = trajectories.len();
        let mut mean = first.clone();
        mean.truncate(times);
        let mut error = mean.clone();
        for t in 0..times {
            for i in 0..first.shape.width() {
                (mean.rows[t][i], error.rows[t][i]) = mean_and_error(trajectories.iter().map(|path| path.rows[t][i]));
            }
        }
        Some(Self { mean, standard_error: (count > 1).then_some(error), count })
    }

    /// `tr r` at every time, with its standard error.
    ///
    /// Its error needs the trajectories themselves, since the diagonal entries are correlated.
    pub fn trace_over(trajectories: &[Trajectory]) -> Vec<(f64, f64)> {
        let traces: Vec<_> = trajectories.iter().map(Trajectory::trace).collect();
        let times = traces.iter().map(Vec::len).min().unwrap_or(0);
        (0..times).map(|t| mean_and_error(traces.iter().map(|trace| trace[t]))).collect()
    }
}

/// Mean and standard error of the mean; the error of a single value is NaN.
pub fn mean_and_error(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    /// Squares of smaller numbers, and their sums, are numbers too.
    const LARGE: f64 = 1e140;
    let size = largest_size(values.clone());
    let scale = if size > LARGE && size.is_finite() { size } else { 1.0 };
    let values = values.map(|v| v / scale);
    let n = values.clone().count() as f64;
    let mean = values.clone().sum::<f64>() / n;
    let square = values.map(|v| (v - mean) * (v - mean)).sum::<f64>();
    (mean * scale, (square / (n - 1.0) / n).sqrt() * scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_of_large_numbers_are_numbers() {
        let of = |values: [f64; 3]| mean_and_error(values.into_iter());
        let (mean, error) = of([1.0, 2.0, 6.0]);
        let (large, of_large) = of([1e300, 2e300, 6e300]);
        assert!((large / 1e300 - mean).abs() < 1e-14 && (of_large / 1e300 - error).abs() < 1e-14);
        assert_eq!(of([1.7e308; 3]), (1.7e308, 0.0));
        assert!(of([f64::NAN, 1e300, 1.0]).0.is_nan());
    }

    #[test]
    fn rows_hold_what_their_index_says() {
        let shape = Shape { heads: 3, features: 2 };
        let m = DMatrix::from_fn(3, 2, |h, f| (10 * h + f) as f64);
        let r = DMatrix::from_fn(3, 3, |h, k| 100.0 + (10 * h + k) as f64);
        let row = shape.row(-1.0, &m, &r, &[200.0, 201.0, 202.0]);
        assert_eq!(row.len(), shape.width());
        for (i, quantity) in shape.quantities().enumerate() {
            assert_eq!(shape.index(quantity), i);
        }
        assert_eq!(row[shape.index(Quantity::Overlap { head: 1, other: 2 })], 112.0);
        assert_eq!(row[shape.index(Quantity::Bias { head: 2 })], 202.0);
    }

    #[test]
    fn averages_have_the_textbook_error() {
        let shape = Shape { heads: 1, features: 1 };
        let path = |v: f64| Trajectory { shape, times: vec![0.0], rows: vec![vec![v; shape.width()]] };
        let estimate = Estimate::over(&[path(1.0), path(2.0), path(6.0)]).unwrap();
        assert_eq!(estimate.mean.rows[0][0], 3.0);
        let error = estimate.standard_error.unwrap().rows[0][0];
        assert!((error - (7.0f64 / 3.0).sqrt()).abs() < 1e-14);
        assert!(Estimate::over(&[path(1.0)]).unwrap().standard_error.is_none());
        assert!(Estimate::over(&[]).is_none());
    }

    #[test]
    fn averages_end_where_the_shortest_ends() {
        let shape = Shape { heads: 1, features: 1 };
        let path = |n: usize| Trajectory {
            shape,
            times: (0..n).map(|t| t as f64).collect(),
            rows: vec![vec![0.0; shape.width()]; n],
        };
        assert_eq!(Estimate::over(&[path(3), path(2)]).unwrap().mean.times.len(), 2);
    }
}
