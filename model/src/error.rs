//! What can be wrong with the input, each as one line: what, where, what to do.

use thiserror::Error;

/// An input that cannot be used.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum Error {
    /// A field holds a value outside its domain.
    #[error("{field}: {problem}")]
    Invalid {
        /// The field's name, as in a spec.
        field: String,
        /// What is wrong and what would be right.
        problem: String,
    },
    /// A spec has a field that does not exist.
    #[error("{place}: unknown field \"{name}\"{}", nearest.as_ref().map(|n| format!("; did you mean \"{n}\"?")).unwrap_or_default())]
    UnknownField {
        /// Where the field stands (`spec`, `theta`, ...).
        place: String,
        /// The name that was given.
        name: String,
        /// The valid name closest to it, when one is close.
        nearest: Option<String>,
    },
    /// Overlaps that no keys can have.
    #[error(
        "{field}: impossible overlaps, r - m m^T has the eigenvalue {eigenvalue:.6e} but must be positive semi-definite; \
         raise the diagonal of r, or shrink m"
    )]
    ImpossibleOverlaps {
        /// The field that holds the overlaps.
        field: String,
        /// The smallest eigenvalue of `r - m m^T`.
        eigenvalue: f64,
    },
    /// A file or text that does not hold what it should.
    #[error("{place}: {problem}")]
    Unreadable {
        /// The file, or the flag, that holds the text.
        place: String,
        /// What is wrong with it.
        problem: String,
    },
}

impl Error {
    /// An [`Error::Invalid`] for `field`.
    pub fn invalid(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Invalid { field: field.into(), problem: problem.into() }
    }

    /// An [`Error::Unreadable`] at `place`.
    pub fn unreadable(place: impl Into<String>, problem: impl ToString) -> Self {
        Self::Unreadable { place: place.into(), problem: problem.to_string() }
    }
}

/// Refuses a number that is not finite.
pub(crate) fn finite(field: &str, value: f64) -> Result<(), Error> {
    if value.is_finite() { Ok(()) } else { Err(Error::invalid(field, format!("{value} is not a finite number"))) }
}
