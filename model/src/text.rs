//! Text from outside, such as names out of files, as a terminal or a figure may show it; and numbers in words.

use std::borrow::Cow;

/// Whether a character is more than ink: it moves the cursor, ends a line or turns the direction of writing.
fn commands(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

/// `text` with every control character, line separator and change of direction written out as JSON does (`\u001b`),
/// so that it stays on its line and commands nothing.
///
/// ```
/// use headflow_model::text::shown;
/// assert_eq!(shown("red \u{1b}[31m\n"), r"red \u001b[31m\u000a");
/// assert_eq!(shown("héads θ"), "héads θ");
/// ```
pub fn shown(text: &str) -> Cow<'_, str> {
    if !text.contains(commands) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if commands(c) { out += &format!("\\u{:04x}", c as u32) } else { out.push(c) }
    }
    Cow::Owned(out)
}

/// [`shown`], cut with an ellipsis after `most` characters.
///
/// ```
/// use headflow_model::text::cut;
/// assert_eq!(cut("a very long name", 6), "a very…");
/// assert_eq!(cut("short", 6), "short");
/// ```
pub fn cut(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        // Not all of a long text need be looked through.
        Some((end, _)) => format!("{}…", shown(&text[..end])),
        None => shown(text).into_owned(),
    }
}

/// A number for a title: as it is where that is short, else to six digits.
///
/// ```
/// use headflow_model::text::short;
/// assert_eq!(short(0.0005), "0.0005");
/// assert_eq!(short(1e300), "1e300");
/// assert_eq!(short(-0.000000001234), "-1.234e-9");
/// assert_eq!(short(2.0 / 3.0), "0.666667");
/// ```
pub fn short(value: f64) -> String {
    const LONG: usize = 9;
    let whole = value.to_string();
    if whole.len() <= LONG {
        return whole;
    }
    let rounded: f64 = format!("{value:.5e}").parse().unwrap_or(value);
    let (plain, power) = (rounded.to_string(), format!("{rounded:e}"));
    if plain.len() <= LONG { plain } else { power }
}

/// A number with so many decimals, in the form of [`short`] where they would be many digits or all zero.
///
/// ```
/// use headflow_model::text::rounded;
/// assert_eq!(rounded(0.12345, 2), "0.12");
/// assert_eq!(rounded(-1e300, 2), "-1e300");
/// assert_eq!(rounded(1.2e-9, 2), "1.2e-9");
/// ```
pub fn rounded(value: f64, decimals: usize) -> String {
    let smallest = 0.5 * 10f64.powi(-(decimals as i32));
    let fits = value == 0.0 || (smallest..1e6).contains(&value.abs());
    if fits || !value.is_finite() { format!("{value:.decimals$}") } else { short(value) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_shown_commands_a_terminal() {
        let all: String = (0..0x1_1000).filter_map(char::from_u32).collect();
        let shown = shown(&all);
        assert!(!shown.contains(char::is_control) && !shown.contains(commands));
        // All else is as it was.
        assert_eq!(shown.chars().filter(|c| *c == 'é').count(), 1);
        assert_eq!(super::shown("\u{9b}2J\u{7f}\u{202e}"), r"\u009b2J\u007f\u202e");
    }

    #[test]
    fn cutting_keeps_whole_characters() {
        assert_eq!(cut("θθθθ", 2), "θθ…");
        assert_eq!(cut("\n\n\n", 2), r"\u000a\u000a…");
        assert_eq!(cut("", 0), "");
    }

    /// Every number is short, and the same to six digits.
    #[test]
    fn numbers_are_short_and_right() {
        for exponent in -307..=307 {
            for mantissa in [1.0, -1.5, 1.234_567_891, 9.999_999_9] {
                let value: f64 = format!("{mantissa}e{exponent}").parse().unwrap();
                let text = short(value);
                assert!(text.len() <= 13, "{text}");
                let back: f64 = text.parse().unwrap();
                // Half a unit in the sixth digit, at the worst of a mantissa of 1.
                assert!((back / value - 1.0).abs() <= 5.1e-6, "{text} for {value}");
            }
        }
        let decimals = [0.0, 0.004, -0.006, 999_999.0, f64::NAN, 1e6, -1e-300, 2.5e20].map(|v| rounded(v, 2));
        assert_eq!(decimals, ["0.00", "0.004", "-0.01", "999999.00", "NaN", "1000000", "-1e-300", "2.5e20"]);
        for (value, text) in
            [(0.0, "0"), (1000.0, "1000"), (0.1 + 0.2, "0.3"), (f64::NAN, "NaN"), (f64::INFINITY, "inf")]
        {
            assert_eq!(short(value), text);
        }
    }
}
