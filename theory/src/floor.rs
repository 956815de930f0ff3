//! Losses that no keys can go below (`theory/README.md` section 16).
//!
//! No attention beats the Bayes risk `R`, since `loss = R + E |p - a|^2`. A softmax or softmax1 head obeys more: for any
//! other token, `A_h,eps <= sigmoid(s_eps - s_l)`, and `s_eps - s_l = m_h . theta + N(0, 2 r_hh)` whatever the bias; where
//! `theta` and `-theta` are as likely, this is symmetric, so `E[A_h,eps] <= 1/2`. In general `<= 1 - s/2`, with `s` the part of
//! `P_theta` that is symmetric. So `y = E[a_eps] <= Y = g H (1 - s/2)`, and with `E[a_eps] = E <a, p>` and `E |p|^2 = 1 - R`
//! Cauchy and Schwarz bound the second moment:
//!
//! ```text
//! total attention B spent exactly (softmax B = g H, bayes-softmax B = g):
//!     loss >= 1 - 2 y + B^2 / L + (y - B/L)^2 / (1 - 1/L - R),    y = min(Y, B/L + 1 - 1/L - R)
//! softmax1:
//!     loss >= 1 - 2 y + y^2 / (1 - R),                            y = min(Y, 1 - R)
//! ```
//!
//! For softmax with mean and a symmetric `theta` this tends to `L / (4 (L - 1))` as the signal grows: a floor that stays. It
//! is approached by an even number of heads in opposite pairs.

use headflow_model::{Activation, Aggregation, Attention, Task, Theta, larger, largest_size};
use nalgebra::{DMatrix, DVector};
use statrs::function::erf::erfc;

use crate::quadrature::signals::{gaussian, support};

/// A loss that `heads` heads cannot pass, given the Bayes risk: never below it. NaN where that is.
pub fn floor(task: &Task, heads: usize, attention: &Attention, bayes_risk: f64) -> f64 {
    let length = task.length() as f64;
    let g = attention.gain(heads);
    let s = symmetric_part(task.theta());
    // One bayes-softmax head is a softmax head.
    let single = heads == 1 && attention.activation == Activation::BayesSoftmax;
    let most = g * heads as f64 * (1.0 - 0.5 * s);
    let known = 1.0 - bayes_risk;
    let bound = match attention.activation {
        Activation::Softmax => exact_budget(g * heads as f64, most, length, bayes_risk),
        Activation::BayesSoftmax if single => exact_budget(g, most, length, bayes_risk),
        Activation::BayesSoftmax => exact_budget(g, g, length, bayes_risk),
        Activation::Softmax1 => {
            let y = most.min(known);
            1.0 - 2.0 * y + y * y / known
        }
    };
    // On the symmetric part of theta alone: better where there is little of it.
    let of_one = attention.aggregation == Aggregation::Mean || heads == 1;
    let of_part = match attention.activation {
        Activation::Softmax if of_one => s * 0.25 * length / (length - 1.0),
        Activation::BayesSoftmax if single => s * 0.25 * length / (length - 1.0),
        Activation::Softmax1 if of_one => s * 0.25,
        _ => 0.0,
    };
    larger(larger(bound, of_part), bayes_risk)
}

/// The least loss with total attention `budget` and at most `most` of it, on average, on the relevant token.
fn exact_budget(budget: f64, most: f64, length: f64, bayes_risk: f64) -> f64 {
    let share = budget / length;
    let room = 1.0 - 1.0 / length - bayes_risk;
    if room <= 0.0 {
        // Nothing is known of the relevant token: uniform attention of this budget.
        return 1.0 - 2.0 * share + budget * share;
    }
    let y = most.min(share + room);
    1.0 - 2.0 * y + budget * share + (y - share) * (y - share) / room
}

/// `int min(p(theta), p(-theta))`: 1 for a symmetric `P_theta`; `2 Phi(-sqrt(mean^T cov^-1 mean))` for a Gaussian.
pub fn symmetric_part(theta: &Theta) -> f64 {
    if let Theta::Flip { .. } | Theta::Sphere { .. } = theta {
        return 1.0;
    }
    if let Some((mean, covariance)) = gaussian(theta) {
        return of_gaussian(&mean, covariance);
    }
    let Ok(Some(points)) = support(theta) else { return 0.0 };
    points
        .iter()
        .map(|point| {
            let mirror = -&point.mean;
            let mirrored = points.iter().find(|other| other.mean == mirror);
            mirrored.map_or(0.0, |other| point.weight.min(other.weight))
        })
        .sum()
}

fn of_gaussian(mean: &DVector<f64>, covariance: DMatrix<f64>) -> f64 {
    let eigen = covariance.symmetric_eigen();
    let along = eigen.eigenvectors.transpose() * mean;
    let largest = largest_size(eigen.eigenvalues.iter());
    let mut square = 0.0;
    for (m, v) in along.iter().zip(&eigen.eigenvalues) {
        if *v > 1e-14 * largest {
            square += m * m / v;
        } else if m.abs() > 1e-12 * mean.norm() {
            return 0.0;
        }
    }
    erfc((square / 2.0).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(activation: Activation, aggregation: Aggregation, heads: usize, length: usize, risk: f64) -> f64 {
        let task = Task::new(length, Theta::Flip { nu: vec![1.0] }).unwrap();
        let attention = Attention { aggregation, ..Attention::from(activation) };
        floor(&task, heads, &attention, risk)
    }

    #[test]
    fn limits_of_large_signals() {
        use Activation::{BayesSoftmax, Softmax, Softmax1};
        use Aggregation::{Mean, Sum};
        let cases = [
            (Softmax, Mean, 2, 0.3),
            (Softmax, Sum, 1, 0.3),
            (Softmax, Sum, 2, 0.2),
            (Softmax, Sum, 3, 4.0 / 6.0),
            (Softmax1, Mean, 4, 0.25),
            (Softmax1, Sum, 1, 0.25),
            (Softmax1, Sum, 2, 0.0),
            (BayesSoftmax, Sum, 2, 0.0),
            (BayesSoftmax, Sum, 1, 0.3),
            (BayesSoftmax, Mean, 2, 0.25),
        ];
        for (activation, aggregation, heads, expected) in cases {
            let found = of(activation, aggregation, heads, 6, 0.0);
            assert!((found - expected).abs() < 1e-12, "{activation:?} {aggregation:?} {heads}: {found}");
        }
    }

    #[test]
    fn without_a_signal_uniform_attention_is_the_best() {
        let found = of(Activation::Softmax, Aggregation::Mean, 3, 5, 0.8);
        assert!((found - 0.8).abs() < 1e-12);
    }

    /// At two tokens a symmetric theta leaves softmax with mean no better than uniform attention.
    #[test]
    fn two_tokens() {
        assert!((of(Activation::Softmax, Aggregation::Mean, 2, 2, 0.0) - 0.5).abs() < 1e-12);
    }

    #[test]
    fn symmetric_parts() {
        let points = vec![vec![1.0], vec![-1.0], vec![3.0]];
        let discrete = Theta::Discrete { points, weights: vec![0.5, 0.2, 0.3] };
        assert!((symmetric_part(&discrete) - 0.4).abs() < 1e-15);
        let gaussian = |mean: f64, sd: f64| {
            symmetric_part(&Theta::Gaussian { mean: vec![mean, 0.0], sd: Some(vec![sd, 1.0]), cov: None })
        };
        assert_eq!(gaussian(0.0, 1.0), 1.0);
        // 2 Phi(-1), to the digits of the library's erfc.
        let found = gaussian(2.0, 2.0);
        assert!((found - 0.317_310_507_862_914_1).abs() < 1e-10, "{found}");
        assert_eq!(gaussian(2.0, 0.0), 0.0);
    }
}
