//! What can go wrong, each as one line: what, where, what to do.

use thiserror::Error;

/// Why there is no result.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum Error {
    /// A tensor of another size than its shape asks for.
    #[error("{what}: {found} numbers, but {expected} are needed for {shape}")]
    Size {
        /// The tensor.
        what: &'static str,
        /// How many numbers it has.
        found: usize,
        /// How many it should have.
        expected: usize,
        /// The shape in words, such as "4 tokens x 2 heads x 8".
        shape: String,
    },
    /// A number that is NaN or infinite.
    #[error("{}: {what} is not finite, so attention is not defined there", place(*.layer, *.head, *.position))]
    NotFinite {
        /// What is not finite: "the query", "a score", ...
        what: &'static str,
        /// The layer, where there are several.
        layer: Option<usize>,
        /// The head: of the queries for a query or a score, of the keys for a key or a value.
        head: usize,
        /// The token; none for a learned sink.
        position: Option<usize>,
    },
    /// A setting outside its domain.
    #[error("{field}: {problem}")]
    Invalid {
        /// Its name.
        field: &'static str,
        /// What is wrong and what would be right.
        problem: String,
    },
    /// A file or a text that cannot be used.
    #[error("{place}: {problem}")]
    Unreadable {
        /// The file, or the part of it.
        place: String,
        /// What is wrong with it.
        problem: String,
    },
    /// Work that would take more than there is, refused before it begins.
    #[error("{field}: {needs}, above the limit of {limit}; {advice}")]
    TooCostly {
        /// What makes it so costly.
        field: &'static str,
        /// What it would need, with its unit.
        needs: String,
        /// The limit, with its unit.
        limit: String,
        /// What would be cheaper.
        advice: &'static str,
    },
    /// The caller asked to stop.
    #[error("interrupted")]
    Interrupted,
}

fn place(layer: Option<usize>, head: usize, position: Option<usize>) -> String {
    let layer = layer.map(|layer| format!("layer {layer}, ")).unwrap_or_default();
    match position {
        Some(position) => format!("{layer}head {head}, position {position}"),
        None => format!("{layer}head {head}, sink"),
    }
}

impl Error {
    /// An [`Error::Invalid`] for `field`.
    pub fn invalid(field: &'static str, problem: impl Into<String>) -> Self {
        Self::Invalid { field, problem: problem.into() }
    }

    /// An [`Error::Unreadable`] at `place`.
    pub fn unreadable(place: impl Into<String>, problem: impl ToString) -> Self {
        Self::Unreadable { place: place.into(), problem: problem.to_string() }
    }

    /// The same error, in a layer of a model.
    #[must_use]
    pub fn in_layer(self, layer: usize) -> Self {
        match self {
            Self::NotFinite { what, head, position, .. } => {
                Self::NotFinite { what, layer: Some(layer), head, position }
            }
            other => other,
        }
    }
}
