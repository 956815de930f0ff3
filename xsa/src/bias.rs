//! The attention similarity bias in theory (model.md section 11). If values share a direction,
//! `v_j = sqrt(rho) u + sqrt(1 - rho) w_j` with independent `w_j` in a large head size,
//!
//! ```text
//! cos(y_i, v_i) = (rho + (1 - rho) a_ii) / sqrt(rho + (1 - rho) sum_j a_ij^2)
//! ```
//!
//! Correlated values (`rho`) and attention to oneself (`a_ii`) are its two causes. [`Prediction`] lists
//! its forms, each taken position by position and then averaged over a head.

use crate::measurement::Measurement;

/// `(rho + (1 - rho) own) / sqrt(rho + (1 - rho) square)`, with `own` the weight of the token itself and
/// `square` the sum of squared weights. 0 where the denominator vanishes.
pub fn closed_form(rho: f64, own: f64, square: f64) -> f64 {
    ratio(rho + (1.0 - rho) * own, rho, square)
}

/// `numerator / sqrt(rho + (1 - rho) square)`.
fn ratio(numerator: f64, rho: f64, square: f64) -> f64 {
    let denominator = rho + (1.0 - rho) * square;
    if denominator <= 0.0 { 0.0 } else { numerator / denominator.sqrt() }
}

/// `sum_{j != i} b_ij cos(v_i, v_j) / sum_{j != i} b_ij`, both sums also over the positions of a head from 1
/// on: how similar the values it attends to are to the own one. `rho` is the same for uniform attention.
pub fn attended_rho(measured: &Measurement, head: usize) -> f64 {
    let similarity = &measured.of_head(&measured.attended_similarity, head)[1..];
    let own = &measured.of_head(&measured.weighted_self, head)[1..];
    let (mut others, mut weight) = (0.0, 0.0);
    for (similarity, own) in similarity.iter().zip(own) {
        others += similarity - own;
        weight += 1.0 - own;
    }
    // A head that attends to itself alone has no others.
    if weight > 0.0 { (others / weight).clamp(-1.0, 1.0) } else { 0.0 }
}

/// Forms of the closed form. `b_ij = a_ij |v_j| / sum_k a_ik |v_k|` are weights times norms of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prediction {
    /// `rho`, `a_ii` and `sum a_ij^2`: values of one norm.
    ClosedForm,
    /// `rho`, `b_ii` and `sum b_ij^2`: values of their measured norms.
    NormWeighted,
    /// One number more for each head, `rho_h` of [`attended_rho`]: heads attend to values that are more, or less,
    /// similar to the own one than average, some even opposite.
    ///
    /// ```text
    /// (rho_h + (1 - rho_h) b_ii) / sqrt(|rho_h| + (1 - |rho_h|) sum_j b_ij^2)
    /// ```
    AttendedValues,
    /// A diagnostic, with a number for each position: `sum_j b_ij cos(v_i, v_j)`, the exact numerator, over the
    /// denominator of [`Prediction::NormWeighted`].
    ExactNumerator,
}

impl Prediction {
    /// All, in that order.
    pub const ALL: [Self; 4] = [Self::ClosedForm, Self::NormWeighted, Self::AttendedValues, Self::ExactNumerator];

    /// Its name in documents and figures.
    pub fn name(self) -> &'static str {
        match self {
            Self::ClosedForm => "closed form",
            Self::NormWeighted => "norm-weighted",
            Self::AttendedValues => "attended values",
            Self::ExactNumerator => "exact numerator",
        }
    }

    /// The predicted mean cosine of a head, over positions from 1 on; NaN for a single token.
    pub fn of_head(self, measured: &Measurement, head: usize) -> f64 {
        let shape = measured.shape;
        let rho = measured.rho[shape.key_value_head(head)];
        let attended = attended_rho(measured, head);
        let at = |quantity: &[f64], i: usize| quantity[head * shape.tokens + i];
        let of_position = |i: usize| {
            let (own, square) = (at(&measured.weighted_self, i), at(&measured.weighted_square, i));
            match self {
                Self::ClosedForm => {
                    closed_form(rho, at(&measured.self_attention, i), at(&measured.squared_attention, i))
                }
                Self::NormWeighted => closed_form(rho, own, square),
                Self::AttendedValues => ratio(attended + (1.0 - attended) * own, attended.abs(), square),
                Self::ExactNumerator => ratio(at(&measured.attended_similarity, i), rho, square),
            }
        };
        (1..shape.tokens).map(of_position).sum::<f64>() / (shape.tokens as f64 - 1.0)
    }
}

/// How predictions for several heads compare with what was measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    /// Pearson's correlation coefficient; NaN where either side does not vary.
    pub correlation: f64,
    /// The mean of `|predicted - measured|`.
    pub mean_absolute_error: f64,
    /// The mean of `predicted - measured`.
    pub mean_error: f64,
    /// The numbers of the entries, those that are missed most first.
    pub worst: Vec<usize>,
}

/// Compares predictions with measurements, entry by entry.
///
/// # Panics
/// When the two are not of one length.
pub fn compare(predicted: &[f64], measured: &[f64]) -> Comparison {
    assert_eq!(predicted.len(), measured.len(), "a prediction for each measurement");
    let count = measured.len() as f64;
    let mean = |values: &[f64]| values.iter().sum::<f64>() / count;
    let centre = (mean(predicted), mean(measured));
    let (mut product, mut squares) = (0.0, (0.0, 0.0));
    for (p, m) in predicted.iter().zip(measured) {
        product += (p - centre.0) * (m - centre.1);
        squares.0 += (p - centre.0).powi(2);
        squares.1 += (m - centre.1).powi(2);
    }
    let errors: Vec<f64> = predicted.iter().zip(measured).map(|(p, m)| p - m).collect();
    let mut worst: Vec<usize> = (0..errors.len()).collect();
    worst.sort_by(|&a, &b| errors[b].abs().total_cmp(&errors[a].abs()));
    Comparison {
        correlation: product / (squares.0 * squares.1).sqrt(),
        mean_absolute_error: errors.iter().map(|e| e.abs()).sum::<f64>() / count,
        mean_error: mean(&errors),
        worst,
    }
}
