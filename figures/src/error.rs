//! What can go wrong between a result folder and its figure.

use std::io;
use std::path::PathBuf;

/// A result that cannot be read, or a figure that cannot be drawn. Every message is one line, and
/// names the file where there is one.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file that a result folder must hold is not there.
    #[error("{}: no such file; a result folder holds result.json and series.csv", .path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// A file cannot be read.
    #[error("{}: {source}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A file cannot be written: a full disk, missing permission.
    #[error("{}: cannot be written: {source}", .path.display())]
    Unwritable {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A file is truncated, or something other than a headflow result.
    #[error("{}: {problem}", .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The table of numbers is truncated or something else; the message names the file.
    #[error(transparent)]
    Series(headflow_model::Error),
    /// There is no result to draw.
    #[error("no result folder given: a figure needs at least one")]
    NoResult,
    /// The drawing itself failed.
    #[error("drawing failed: {0}")]
    Drawing(String),
}

impl Error {
    /// An [`Error::Unreadable`] for the file at `path`.
    pub(crate) fn unreadable(path: impl Into<PathBuf>, problem: impl ToString) -> Self {
        Self::Unreadable { path: path.into(), problem: problem.to_string() }
    }

    /// An [`Error::Unreadable`] for a result without the field that a figure draws.
    pub(crate) fn lacking(path: impl Into<PathBuf>, field: &str) -> Self {
        Self::unreadable(path, format!("holds no \"{field}\", which this figure draws"))
    }

    /// An [`Error::File`], or [`Error::Missing`] if the file is not there.
    pub(crate) fn reading(path: impl Into<PathBuf>, source: io::Error) -> Self {
        let path = path.into();
        if source.kind() == io::ErrorKind::NotFound { Self::Missing { path } } else { Self::File { path, source } }
    }
}
