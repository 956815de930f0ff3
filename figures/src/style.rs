//! Font, palette and sizes. Lengths are pixels of a figure [`WIDTH`] wide; at 17 cm that is 37 pixels
//! to 4 mm, so that text of 26 pixels prints at about 8 points.

use std::sync::OnceLock;

use plotters::style::{FontStyle, RGBColor, register_font};

use crate::error::Error;

/// Width of a figure.
pub const WIDTH: f64 = 1600.0;
/// Size of titles.
pub const TITLE: f64 = 31.0;
/// Size of labels and legends.
pub const LABEL: f64 = 30.0;
/// Size of tick labels.
pub const TICK: f64 = 27.0;
/// Size of remarks inside a panel.
pub const NOTE: f64 = 25.0;
/// Size of numbers on contours.
pub const CONTOUR: f64 = 23.0;

/// Font family: the registered font in the PNG, with a substitute for viewers of the SVG.
pub const FONT: &str = "DejaVu Sans, sans-serif";

/// Text and frames.
pub const INK: RGBColor = RGBColor(30, 30, 30);
/// Quantities that belong to no head.
pub const NEUTRAL: RGBColor = RGBColor(30, 30, 30);
/// Reference lines.
pub const GUIDE: RGBColor = RGBColor(150, 150, 150);
/// Grid.
pub const GRID: RGBColor = RGBColor(232, 232, 232);
/// Shaded intervals.
pub const SHADE: RGBColor = RGBColor(238, 238, 238);

/// Two of [`PALETTE`] that few heads have, for other kinds of data.
pub const SKY: RGBColor = RGBColor(86, 180, 233);
/// The other of the two.
pub const ORANGE: RGBColor = RGBColor(230, 159, 0);

/// Okabe and Ito's colour-blind safe colours, the weakest on white last.
const PALETTE: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    SKY,
    ORANGE,
    RGBColor(0, 0, 0),
    RGBColor(240, 228, 66),
];

/// Dash pattern of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dash {
    Solid,
    Dashed,
    Dotted,
    Mixed,
}

impl Dash {
    /// The solid line first.
    pub const ALL: [Self; 4] = [Self::Solid, Self::Dashed, Self::Dotted, Self::Mixed];
    const BROKEN: [Self; 3] = [Self::Dashed, Self::Dotted, Self::Mixed];

    /// The `rank`-th dash of lines that are all broken.
    pub fn broken(rank: usize) -> Self {
        Self::BROKEN[rank % Self::BROKEN.len()]
    }

    /// Lengths of strokes and gaps by turns, an even number; empty for an unbroken line.
    pub fn lengths(self) -> &'static [f64] {
        match self {
            Self::Solid => &[],
            Self::Dashed => &[14.0, 8.0],
            Self::Dotted => &[3.5, 6.5],
            Self::Mixed => &[20.0, 6.5, 3.5, 6.5],
        }
    }
}

/// Shape of a marker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Marker {
    Circle,
    Square,
    Triangle,
    Diamond,
    /// A triangle on its tip.
    Wedge,
    Pentagon,
    Hexagon,
}

/// Colour of a head; colours repeat after eight heads.
pub fn head_color(head: usize) -> RGBColor {
    PALETTE[head % PALETTE.len()]
}

/// Look of the `rank`-th curve drawn over a map: dark or warm, unlike the map's colours.
pub fn boundary_look(rank: usize) -> (RGBColor, Dash) {
    const COLORS: [RGBColor; 4] = [PALETTE[1], PALETTE[6], PALETTE[3], ORANGE];
    (COLORS[rank % COLORS.len()], Dash::ALL[rank % Dash::ALL.len()])
}

/// Colour of a head in text, dark enough to be read.
pub fn head_ink(head: usize) -> RGBColor {
    const LIGHTEST: f64 = 125.0;
    let RGBColor(r, g, b) = head_color(head);
    let luminance = 0.299 * f64::from(r) + 0.587 * f64::from(g) + 0.114 * f64::from(b);
    let darken = |c: u8| (f64::from(c) * (LIGHTEST / luminance).min(1.0)).round() as u8;
    RGBColor(darken(r), darken(g), darken(b))
}

/// Dash of a head: tells heads of one colour apart.
pub fn head_dash(head: usize) -> Dash {
    Dash::ALL[head / PALETTE.len() % Dash::ALL.len()]
}

/// Marker of the `rank`-th largest dimension.
pub fn dimension_marker(rank: usize) -> Marker {
    [Marker::Circle, Marker::Square, Marker::Triangle, Marker::Pentagon][rank % 4]
}

/// Marker of the `rank`-th largest dimension for a second engine beside the first.
pub fn second_marker(rank: usize) -> Marker {
    [Marker::Diamond, Marker::Wedge, Marker::Hexagon][rank % 3]
}

/// `color` mixed with white: 0 leaves it, 1 is white.
pub fn paler(color: RGBColor, amount: f64) -> RGBColor {
    let mix = |c: u8| (f64::from(c) + (255.0 - f64::from(c)) * amount).round() as u8;
    RGBColor(mix(color.0), mix(color.1), mix(color.2))
}

/// Makes the font known to plotters, which otherwise would draw no text at all.
///
/// # Errors
/// When the font is unusable.
pub fn register() -> Result<(), Error> {
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    if *REGISTERED.get_or_init(|| register_font(FONT, FontStyle::Normal, dejavu::sans::regular()).is_ok()) {
        Ok(())
    } else {
        Err(Error::Drawing("the font cannot be registered".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn twenty_four_heads_look_different() {
        let looks: Vec<_> = (0..24).map(|h| (head_color(h), head_dash(h))).collect();
        for (i, look) in looks.iter().enumerate() {
            assert!(!looks[..i].contains(look));
        }
    }
}
