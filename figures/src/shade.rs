//! Colours of values: viridis between the lowest and the highest, on a linear or logarithmic scale.

use plotters::style::RGBColor;
use plotters::style::colors::colormaps::{ColorMap, ViridisRGB};

use crate::panel::{Range, Scale, plain};
use crate::style::INK;

/// The colour at `part` of the way from dark to light, 0 to 1; lightness grows all along.
pub fn viridis(part: f64) -> RGBColor {
    ViridisRGB.get_color(part.clamp(0.0, 1.0))
}

/// Perceived brightness from 0 to 1.
fn brightness(color: RGBColor) -> f64 {
    let RGBColor(r, g, b) = color;
    (0.299 * f64::from(r) + 0.587 * f64::from(g) + 0.114 * f64::from(b)) / 255.0
}

/// White on dark colours, ink on light ones.
pub fn ink_on(color: RGBColor) -> RGBColor {
    if brightness(color) < 0.5 { RGBColor(255, 255, 255) } else { INK }
}

/// A continuous scale of colours.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shades {
    /// Between places of the scale.
    range: Range,
    pub scale: Scale,
}

impl Shades {
    /// The scale that spans the values; `None` if none of them has a place on it.
    pub fn of(values: impl Iterator<Item = f64>, scale: Scale) -> Option<Self> {
        let range = Range::of(values.map(|v| scale.place(v)))?;
        let constant = range.high - range.low <= 1e-9 * range.high.abs().max(range.low.abs());
        Some(Self { range: if constant { range.padded() } else { range }, scale })
    }

    /// The lowest and the highest place.
    pub fn range(&self) -> Range {
        self.range
    }

    /// Where `value` lies between the ends, from 0 to 1; values without a place count as lowest.
    pub fn part(&self, value: f64) -> f64 {
        let place = self.scale.place(value);
        if place.is_finite() { self.range.fraction(place).clamp(0.0, 1.0) } else { 0.0 }
    }

    /// The colour of `value`.
    pub fn color(&self, value: f64) -> RGBColor {
        viridis(self.part(value))
    }

    /// The value as a height for contours, finite also below the scale.
    pub fn height(&self, value: f64) -> f64 {
        let place = self.scale.place(value);
        if place.is_finite() { place } else { self.range.low - 1.0 }
    }

    /// Values to mark on the scale; one without a label is minor.
    pub fn ticks(&self) -> Vec<(f64, String)> {
        const FEW: usize = 3;
        let labelled = |ticks: &[(f64, String)]| {
            ticks.iter().filter(|(value, label)| !label.is_empty() && self.is_inside(*value)).count()
        };
        let counts = [5.0, 6.5, 8.0, 10.0].map(|count| self.scale.ticks(self.range, count));
        let mut ticks = match counts.iter().position(|ticks| labelled(ticks) >= FEW) {
            Some(first) => counts[first].clone(),
            None => counts[counts.len() - 1].clone(),
        };
        if self.scale == Scale::Logarithmic && labelled(&ticks) < FEW {
            // Few decades: what lies between them is marked, too.
            for (value, label) in &mut ticks {
                let step = (*value / 10f64.powf((*value * (1.0 + 1e-9)).log10().floor())).round();
                if [1.0, 2.0, 5.0].contains(&step) {
                    *label = plain(*value);
                }
            }
        }
        ticks
    }

    fn is_inside(&self, value: f64) -> bool {
        (0.02..=0.98).contains(&self.part(value))
    }

    /// About five round values inside the scale, with their labels.
    pub fn levels(&self) -> Vec<(f64, String)> {
        let mut ticks = self.ticks();
        ticks.retain(|(value, label)| !label.is_empty() && self.is_inside(*value));
        ticks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lightness_grows_along_the_colours() {
        let brightnesses: Vec<_> = (0..=100).map(|k| brightness(viridis(f64::from(k) / 100.0))).collect();
        assert!(brightnesses.windows(2).all(|pair| pair[1] > pair[0] - 0.004));
        assert!(brightnesses[0] < 0.2 && brightnesses[100] > 0.8);
        assert_eq!(ink_on(viridis(0.0)), RGBColor(255, 255, 255));
        assert_eq!(ink_on(viridis(1.0)), INK);
    }

    #[test]
    fn values_without_a_place_count_as_lowest() {
        let values = [0.0, -2.0, 1e-4, 1.0];
        let shades = Shades::of(values.into_iter(), Scale::Logarithmic).unwrap();
        assert_eq!(shades.color(0.0), shades.color(1e-4));
        assert!((shades.part(1e-2) - 0.5).abs() < 1e-12);
        assert!(shades.height(-2.0) < shades.height(1e-4));
        let labels = |low: f64, high: f64, scale| -> Vec<String> {
            let shades = Shades::of([low, high].into_iter(), scale).unwrap();
            shades.levels().into_iter().map(|(_, label)| label).collect()
        };
        assert_eq!(labels(1e-4, 1.0, Scale::Logarithmic), ["10⁻³", "10⁻²", "10⁻¹"]);
        assert_eq!(labels(0.008, 0.3, Scale::Logarithmic), ["0.01", "0.02", "0.05", "0.1", "0.2"]);
        assert_eq!(labels(0.1, 1.2, Scale::Linear), ["0.2", "0.4", "0.6", "0.8", "1.0"]);
        assert!(Shades::of([0.0, -1.0].into_iter(), Scale::Logarithmic).is_none());
        let constant = Shades::of([2.0; 3].into_iter(), Scale::Linear).unwrap();
        assert!((constant.part(2.0) - 0.5).abs() < 1e-9);
    }

    #[test]
    fn about_five_levels_are_round() {
        for high in [0.1, 0.13, 0.2, 0.35, 0.51, 0.6, 0.91, 1.0] {
            let levels = Shades::of([0.013, high].into_iter(), Scale::Linear).unwrap().levels();
            assert!((3..=9).contains(&levels.len()), "{high}: {levels:?}");
        }
        for decades in 1..20 {
            let values = [0.013, 0.013 * 10f64.powi(decades)];
            let levels = Shades::of(values.into_iter(), Scale::Logarithmic).unwrap().levels();
            assert!((3..=7).contains(&levels.len()), "{decades}: {levels:?}");
        }
    }
}
