//! What can go wrong, each as one line: what, where, what to do.
//!
//! The kinds are told apart by their variant, never by their words: input that cannot be used, a file that
//! cannot be read, one that cannot be written, work that was interrupted, work beyond a limit, an answer that
//! was not reached.

use thiserror::Error;

/// An input that cannot be used, or work that came to no result.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
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
    /// A file or folder that cannot be written: a full disk, missing permission.
    #[error("{place}: cannot be written: {problem}")]
    Unwritable {
        /// The file or folder.
        place: String,
        /// What the system said, and what to do.
        problem: String,
    },
    /// Work that would take more time or memory than the limit, refused before it begins.
    #[error("{field}: {needs}, above the limit of {limit}; {advice}")]
    TooCostly {
        /// The field that makes it so costly.
        field: String,
        /// What it would need, with its unit: `needs 2.8e12 bytes`.
        needs: String,
        /// The limit, with its unit.
        limit: String,
        /// What would be cheaper.
        advice: String,
    },
    /// A search or an integral that did not reach the accuracy it must have.
    #[error("{what}: {reached}; {advice}")]
    NotConverged {
        /// What was computed.
        what: String,
        /// How far it came.
        reached: String,
        /// What to do.
        advice: String,
    },
    /// Work that was asked to stop before it had a result.
    #[error("{what}: interrupted before there was a result")]
    Interrupted {
        /// The work.
        what: String,
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

    /// An [`Error::Unwritable`] at `place`.
    pub fn unwritable(place: impl Into<String>, problem: impl ToString) -> Self {
        Self::Unwritable { place: place.into(), problem: problem.to_string() }
    }

    /// An [`Error::TooCostly`]: `field` makes it so; `needs` and `limit` with their units.
    pub fn too_costly(
        field: impl Into<String>,
        needs: impl Into<String>,
        limit: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self::TooCostly { field: field.into(), needs: needs.into(), limit: limit.into(), advice: advice.into() }
    }

    /// An [`Error::NotConverged`].
    pub fn not_converged(what: impl Into<String>, reached: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::NotConverged { what: what.into(), reached: reached.into(), advice: advice.into() }
    }

    /// An [`Error::Interrupted`] in `what`.
    pub fn interrupted(what: impl Into<String>) -> Self {
        Self::Interrupted { what: what.into() }
    }
}

/// Refuses a number that is not finite.
pub(crate) fn finite(field: &str, value: f64) -> Result<(), Error> {
    if value.is_finite() { Ok(()) } else { Err(Error::invalid(field, format!("{value} is not a finite number"))) }
}
