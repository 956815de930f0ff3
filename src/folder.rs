//! The folder that a run writes: `series.csv`, `series.npz` and, last, `result.json`.
//!
//! Every file is written beside its place and renamed, so none is ever half-written; a folder with a
//! `result.json` is complete. Whether the folder can be written is found out before any work.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use headflow_model::series::{Series, write_csv};
use headflow_model::{Error, Quantity, Shape, Trajectory};
use ndarray::{Array2, Array3, Array4};
use ndarray_npy::NpzWriter;
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter};
use serde_json::{Serializer, Value};
use tempfile::NamedTempFile;

/// The file that holds an unfinished run.
pub const CHECKPOINT: &str = "checkpoint.json";

/// What runs write, the document first: without it a folder holds no result.
const FILES: [&str; 32] = [
    "result.json",
    "series.csv",
    "series.npz",
    "comparison.png",
    "comparison.svg",
    "specialization.png",
    "specialization.svg",
    "escape.png",
    "escape.svg",
    "hierarchy.png",
    "hierarchy.svg",
    "spectrum.png",
    "spectrum.svg",
    "pruning.png",
    "pruning.svg",
    "phase.png",
    "phase.svg",
    "retrieval.png",
    "retrieval.svg",
    "heads.png",
    "heads.svg",
    "specialised.png",
    "specialised.svg",
    "stages.png",
    "stages.svg",
    "activations.png",
    "activations.svg",
    "positions.npz",
    "xsa-bias.png",
    "xsa-bias.svg",
    "xsa-model.png",
    "xsa-model.svg",
];

/// Where runs go unless told otherwise.
const RESULTS: &str = "results";

/// A folder that is ready for a run's results.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    /// Folders made for this run, the innermost first: removed again if nothing comes of it.
    made: Vec<PathBuf>,
    /// Free of an older run's files.
    cleared: bool,
}

/// Arrays for the replicas of one route, beyond their mean.
#[derive(Debug, Clone)]
pub struct Replicas<'a> {
    /// The route, as in the series.
    pub route: String,
    /// One trajectory each.
    pub trajectories: Vec<&'a Trajectory>,
}

impl RunFolder {
    /// Prepares `out`, or a new numbered folder for `name` under `results/`.
    ///
    /// # Errors
    /// When the folder holds a result and `force` is not given, or cannot be written.
    pub fn prepare(out: Option<&Path>, name: &str, force: bool) -> Result<Self, Error> {
        let folder = match out {
            Some(path) => {
                if path.join("result.json").exists() && !force {
                    return Err(Error::unreadable(
                        path.display().to_string(),
                        "already holds a result; add --force to replace it, or choose another --out",
                    ));
                }
                if path.join(CHECKPOINT).exists() && !force {
                    return Err(Error::unreadable(
                        path.display().to_string(),
                        "holds an unfinished run: go on with --resume, or add --force to drop it",
                    ));
                }
                let missing = path.ancestors().filter(|p| !p.as_os_str().is_empty()).take_while(|p| !p.exists());
                let made = missing.map(Path::to_path_buf).collect();
                // Made before it can fail: what it makes until then goes again.
                let folder = Self { path: path.to_path_buf(), made, cleared: false };
                fs::create_dir_all(path).map_err(|e| unwritable(path, &e))?;
                folder
            }
            None => Self::numbered(name)?,
        };
        // Only an attempt tells: permissions, read-only and full disks all show here.
        NamedTempFile::new_in(&folder.path).map_err(|e| unwritable(&folder.path, &e))?;
        Ok(folder)
    }

    fn numbered(name: &str) -> Result<Self, Error> {
        let root = Path::new(RESULTS);
        let made_root = !root.exists();
        fs::create_dir_all(root).map_err(|e| unwritable(root, &e))?;
        for number in 1u32.. {
            let path = root.join(if number == 1 { name.to_string() } else { format!("{name}-{number}") });
            match fs::create_dir(&path) {
                Ok(()) => {
                    let mut made = vec![path.clone()];
                    made.extend(made_root.then(|| root.to_path_buf()));
                    return Ok(Self { path, made, cleared: true });
                }
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(unwritable(&path, &e)),
            }
        }
        Err(Error::unreadable(root.display().to_string(), "has no free number left"))
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the table and the arrays.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn write_series(&mut self, series: &[Series], replicas: &[Replicas<'_>]) -> Result<(), Error> {
        self.write("series.csv", |to| write_csv(series, to))?;
        self.write("series.npz", |to| write_npz(series, replicas, to))
    }

    /// Writes arrays that numpy reads.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write_arrays(&mut self, name: &str, arrays: &[(&str, Array3<f32>)]) -> Result<(), Error> {
        self.write(name, |to| {
            let failed = |e: &dyn std::fmt::Display| Error::unreadable(name, format!("cannot be written: {e}"));
            let mut npz = NpzWriter::new_compressed(to);
            arrays.iter().try_for_each(|(name, array)| npz.add_array(*name, array).map_err(|e| failed(&e)))?;
            npz.finish().map_err(|e| failed(&e))?;
            Ok(())
        })
    }

    /// Writes the result document; call it last.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write_document(&mut self, document: &Value) -> Result<(), Error> {
        let text = to_text(document);
        self.write("result.json", |to| to.write_all(text.as_bytes()).map_err(|e| Error::unreadable("result.json", e)))
    }

    /// Writes a file of text beside the result.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write_text(&mut self, name: &str, text: &str) -> Result<(), Error> {
        self.write(name, |to| to.write_all(text.as_bytes()).map_err(|e| Error::unreadable(name, e)))
    }

    /// Removes a file, if it is there.
    ///
    /// # Errors
    /// When it is there and cannot be removed.
    pub fn remove(&mut self, name: &str) -> Result<(), Error> {
        match fs::remove_file(self.path.join(name)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(unwritable(&self.path.join(name), &e)),
            _ => Ok(()),
        }
    }

    fn write(&mut self, name: &str, content: impl FnOnce(&mut fs::File) -> Result<(), Error>) -> Result<(), Error> {
        // What is replaced goes first: a folder with a result.json is whole and of one run.
        if !self.cleared {
            FILES.iter().try_for_each(|old| self.remove(old))?;
            self.cleared = true;
        }
        let failed = |e: &dyn std::fmt::Display| {
            Error::unreadable(self.path.join(name).display().to_string(), format!("cannot be written: {e}"))
        };
        let mut file = NamedTempFile::new_in(&self.path).map_err(|e| failed(&e))?;
        content(file.as_file_mut())?;
        file.as_file().sync_all().map_err(|e| failed(&e))?;
        // Temporary files are private to their user; results are as readable as any new file.
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            file.as_file().set_permissions(fs::Permissions::from_mode(0o644)).map_err(|e| failed(&e))?;
        }
        file.persist(self.path.join(name)).map_err(|e| failed(&e.error))?;
        self.made.clear();
        Ok(())
    }
}

impl Drop for RunFolder {
    fn drop(&mut self) {
        for folder in &self.made {
            // Fails, as it should, when something is in it after all.
            let _ = fs::remove_dir(folder);
        }
    }
}

fn unwritable(path: &Path, error: &io::Error) -> Error {
    Error::unreadable(
        path.display().to_string(),
        format!("cannot be written ({error}); choose another folder with --out"),
    )
}

/// The document as text: objects over several lines, arrays of numbers on one.
pub fn to_text(document: &Value) -> String {
    let mut bytes = Vec::new();
    // Writing to memory does not fail.
    if document.serialize(&mut Serializer::with_formatter(&mut bytes, Readable::default())).is_err() {
        return document.to_string();
    }
    bytes.push(b'\n');
    String::from_utf8(bytes).unwrap_or_else(|_| document.to_string())
}

/// Pretty JSON with every array on one line.
#[derive(Default)]
struct Readable {
    pretty: PrettyFormatter<'static>,
    arrays: usize,
}

impl Formatter for Readable {
    fn begin_array<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        self.arrays += 1;
        to.write_all(b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        self.arrays -= 1;
        to.write_all(b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        to.write_all(if first { b"" } else { b", " })
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        Ok(())
    }

    fn begin_object<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        if self.arrays == 0 { self.pretty.begin_object(to) } else { to.write_all(b"{") }
    }

    fn end_object<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        if self.arrays == 0 { self.pretty.end_object(to) } else { to.write_all(b"}") }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        if self.arrays == 0 {
            self.pretty.begin_object_key(to, first)
        } else {
            to.write_all(if first { b"" } else { b", " })
        }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        to.write_all(b": ")
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        if self.arrays == 0 { self.pretty.end_object_value(to) } else { Ok(()) }
    }
}

/// The paths of a shape's quantities as arrays over time, in the order loss, m, r, b.
fn arrays(rows: &[Vec<f64>], shape: Shape) -> (Vec<f64>, Array3<f64>, Array3<f64>, Array2<f64>) {
    let (times, Shape { heads, features }) = (rows.len(), shape);
    (
        rows.iter().map(|row| row[0]).collect(),
        Array3::from_shape_fn((times, heads, features), |(t, head, feature)| {
            rows[t][shape.index(Quantity::Alignment { head, feature })]
        }),
        Array3::from_shape_fn((times, heads, heads), |(t, head, other)| {
            rows[t][shape.index(Quantity::Overlap { head, other })]
        }),
        Array2::from_shape_fn((times, heads), |(t, head)| rows[t][shape.index(Quantity::Bias { head })]),
    )
}

/// Arrays `ROUTE.times` (T), `ROUTE.loss` (T), `ROUTE.m` (T, H, F), `ROUTE.r` (T, H, H), `ROUTE.b`
/// (T, H), the same with `_standard_error`, and for simulations `ROUTE.replica_m` (R, T, H, F) and
/// so on, R replicas; spaces in a route become underscores.
fn write_npz(series: &[Series], replicas: &[Replicas<'_>], to: &mut fs::File) -> Result<(), Error> {
    let failed = |e: &dyn std::fmt::Display| Error::unreadable("series.npz", format!("cannot be written: {e}"));
    let mut npz = NpzWriter::new_compressed(to);
    macro_rules! add {
        ($name:expr, $array:expr) => {
            npz.add_array($name, $array).map_err(|e| failed(&e))?
        };
    }
    for route in series {
        let name = route.route.replace(' ', "_");
        add!(format!("{name}.times"), &ndarray::aview1(&route.values.times));
        let errors = route.errors.iter().map(|errors| (errors, "_standard_error"));
        for (trajectory, suffix) in std::iter::once((&route.values, "")).chain(errors) {
            let (loss, m, r, b) = arrays(&trajectory.rows, trajectory.shape);
            add!(format!("{name}.loss{suffix}"), &ndarray::aview1(&loss));
            add!(format!("{name}.m{suffix}"), &m);
            add!(format!("{name}.r{suffix}"), &r);
            add!(format!("{name}.b{suffix}"), &b);
        }
    }
    for route in replicas {
        let Some(first) = route.trajectories.first() else { continue };
        let name = route.route.replace(' ', "_");
        let times = route.trajectories.iter().map(|t| t.times.len()).min().unwrap_or(0);
        let (count, shape) = (route.trajectories.len(), first.shape);
        let Shape { heads, features } = shape;
        let value = |k: usize, t: usize, q| route.trajectories[k].rows[t][shape.index(q)];
        add!(
            format!("{name}.replica_loss"),
            &Array2::from_shape_fn((count, times), |(k, t)| value(k, t, Quantity::Loss))
        );
        add!(
            format!("{name}.replica_m"),
            &Array4::from_shape_fn((count, times, heads, features), |(k, t, head, feature)| {
                value(k, t, Quantity::Alignment { head, feature })
            })
        );
        add!(
            format!("{name}.replica_r"),
            &Array4::from_shape_fn((count, times, heads, heads), |(k, t, head, other)| {
                value(k, t, Quantity::Overlap { head, other })
            })
        );
        add!(
            format!("{name}.replica_b"),
            &Array3::from_shape_fn((count, times, heads), |(k, t, head)| value(k, t, Quantity::Bias { head }))
        );
    }
    npz.finish().map_err(|e| failed(&e))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_with_a_result_is_not_replaced_unasked() {
        let root = tempfile::tempdir().unwrap();
        let out = root.path().join("run");
        let mut folder = RunFolder::prepare(Some(&out), "flow", false).unwrap();
        folder.write_document(&serde_json::json!({"a": [1, [2.5, 3]], "b": {"c": []}})).unwrap();
        let text = fs::read_to_string(out.join("result.json")).unwrap();
        assert_eq!(text, "{\n  \"a\": [1, [2.5, 3]],\n  \"b\": {\n    \"c\": []\n  }\n}\n");
        assert!(RunFolder::prepare(Some(&out), "flow", false).is_err());
        assert!(RunFolder::prepare(Some(&out), "flow", true).is_ok());
        assert!(out.join("result.json").exists());
    }

    #[test]
    fn a_folder_of_which_nothing_comes_is_removed() {
        let root = tempfile::tempdir().unwrap();
        let out = root.path().join("a/b/run");
        drop(RunFolder::prepare(Some(&out), "flow", false).unwrap());
        assert!(!root.path().join("a").exists());
        // What was there before stays.
        fs::create_dir(root.path().join("a")).unwrap();
        drop(RunFolder::prepare(Some(&out), "flow", false).unwrap());
        assert!(root.path().join("a").exists() && !root.path().join("a/b").exists());
    }

    #[test]
    fn a_file_in_the_way_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        let out = root.path().join("file");
        fs::write(&out, "x").unwrap();
        let error = RunFolder::prepare(Some(&out), "flow", false).unwrap_err().to_string();
        assert!(error.contains("cannot be written"), "{error}");
    }
}
