//! The folder that a run writes: `series.csv`, `series.npz` and, last, `result.json`.
//!
//! Every file is written beside its place, brought to the disk and renamed, so none is ever half-written; a folder with a
//! `result.json` is complete. Whether the folder can be written, and has room, is found out before any work.
//!
//! A folder belongs to one process at a time: a second one is refused. Of what lies in it, only the files of an
//! earlier run are replaced, known by its `result.json` or `checkpoint.json`; a file of somebody else's with a name that
//! the run needs is replaced when that is asked for, and refused otherwise.

use std::fs::{self, File, TryLockError};
use std::io::{self, BufReader, Write};
use std::path::{Path, PathBuf};

use headflow_model::series::{Series, write_csv};
use headflow_model::{Error, Quantity, Shape, Trajectory};
use ndarray::{Array2, Array3, Array4};
use ndarray_npy::NpzWriter;
use serde::{Deserialize, Serialize};
use serde_json::ser::{Formatter, PrettyFormatter};
use serde_json::{Serializer, Value};
use tempfile::NamedTempFile;

/// The file that holds an unfinished run.
pub const CHECKPOINT: &str = "checkpoint.json";

/// The document of a finished run: without it a folder holds no result.
const RESULT: &str = "result.json";

/// Where runs go unless told otherwise.
const RESULTS: &str = "results";

/// Files on their way have names that begin and end like this: what a killed process leaves of them is swept up later.
const TEMPORARY: [&str; 2] = [".headflow-", ".tmp"];

/// Room that a folder must have before any work: about what a small result takes with its figure.
const ROOM: usize = 1 << 20;

/// What runs of a kind write, the document first. Kinds are commands, and figures that compute.
fn files_of(kind: &str) -> Vec<String> {
    let series: &[&str] = &["series.csv", "series.npz"];
    let (plain, drawn): (&[&str], &[&str]) = match kind {
        "flow" | "simulate" | "compare" | "prune" => (series, &["comparison"]),
        // With the figure of the command's name.
        "hierarchy" | "spectrum" | "stages" => (series, &[kind]),
        "xsa-model" => (&["positions.npz"], &[kind]),
        "escape" | "pruning" | "specialization" | "phase" | "retrieval" | "heads" | "specialised" | "activations"
        | "xsa-bias" => (&[], &[kind]),
        _ => (&[], &[]),
    };
    let pictures = drawn.iter().flat_map(|stem| [format!("{stem}.png"), format!("{stem}.svg")]);
    [RESULT].iter().chain(plain).map(ToString::to_string).chain(pictures).collect()
}

/// Whether runs of a kind keep a checkpoint.
fn resumable(kind: &str) -> bool {
    ["simulate", "phase", "retrieval", "heads", "specialised", "stages", "activations"].contains(&kind)
}

/// What tells whose a document is, and of which kind of run.
#[derive(Debug, Deserialize)]
struct Header {
    format: String,
    command: Option<String>,
    figure: Option<String>,
    request: Option<Request>,
}

/// What identifies the cells of a phase diagram.
#[derive(Debug, Deserialize)]
struct Request {
    figure: Option<String>,
}

/// The kind of run that a file of ours is of; none if it is not there, or not ours.
fn kind_of(file: &Path) -> Option<String> {
    // Anything else might block.
    let there = fs::metadata(file).is_ok_and(|metadata| metadata.is_file());
    let file = if there { File::open(file).ok()? } else { return None };
    let header: Header = serde_json::from_reader(BufReader::new(file)).ok()?;
    let kind = match header.format.as_str() {
        "headflow-result" => match (header.command?, header.figure) {
            (command, Some(figure)) if command == "figure" => figure,
            (command, _) if command == "xsa measure" => "xsa-model".into(),
            (command, _) => command.replace(' ', "-"),
        },
        "headflow-checkpoint" => "simulate".into(),
        "headflow-cells" => header.request.and_then(|request| request.figure).unwrap_or_else(|| "phase".into()),
        _ => return None,
    };
    Some(kind)
}

/// A folder that is ready for a run's results, and this process's alone.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    /// Folders made for this run, the innermost first: removed again if nothing comes of it.
    made: Vec<PathBuf>,
    /// Files of an earlier run that the results replace.
    stale: Vec<String>,
    /// The folder itself, locked: nobody else may write to it meanwhile. The lock ends with the process.
    _lock: Option<File>,
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
    /// Prepares `out`, or a new numbered folder for `name` under `results/`, for a run of the kind `name`.
    ///
    /// # Errors
    /// When another process is writing there; the folder cannot be written or has no room; or it holds a result, an
    /// unfinished run or a file that the run would replace, and `force` is not given.
    pub fn prepare(out: Option<&Path>, name: &str, force: bool) -> Result<Self, Error> {
        let folder = match out {
            Some(path) => {
                let missing = path.ancestors().filter(|p| !p.as_os_str().is_empty()).take_while(|p| !p.exists());
                let made = missing.map(Path::to_path_buf).collect();
                // Made before it can fail: what it makes until then goes again.
                let mut folder = Self { path: path.to_path_buf(), made, stale: Vec::new(), _lock: None };
                loop {
                    fs::create_dir_all(path).map_err(|e| unwritable(path, &e))?;
                    if folder.lock()? {
                        break;
                    }
                }
                folder.check(name, force)?;
                folder
            }
            None => {
                let mut folder = Self::numbered(name)?;
                folder.lock()?;
                folder
            }
        };
        folder.sweep();
        // Only an attempt tells: permissions, read-only and full disks all show here.
        let mut probe = temporary(&folder.path).map_err(|e| unwritable(&folder.path, &e))?;
        reserve(probe.as_file_mut())
            .and_then(|()| probe.as_file().sync_all())
            .map_err(|e| unwritable(&folder.path, &e))?;
        Ok(folder)
    }

    /// Takes the folder for this process; false where another one has removed it meanwhile.
    fn lock(&mut self) -> Result<bool, Error> {
        // Where folders cannot be opened or locked, as on some systems, nothing is guarded.
        let Ok(lock) = File::open(&self.path) else { return Ok(true) };
        match lock.try_lock() {
            Ok(()) if !is_at(&lock, &self.path) => return Ok(false),
            Ok(()) => self._lock = Some(lock),
            Err(TryLockError::WouldBlock) => {
                // What it holds is the other's.
                self.made.clear();
                return Err(Error::unwritable(
                    self.path.display().to_string(),
                    "another run is writing to it; wait for its end, or choose another --out",
                ));
            }
            Err(TryLockError::Error(_)) => {}
        }
        Ok(true)
    }

    /// Finds out what lies in the folder: files of an earlier run go when results come, others are in the way.
    fn check(&mut self, name: &str, force: bool) -> Result<(), Error> {
        let place = self.path.display();
        let refused = |problem: String| Err(Error::invalid("out", format!("{place} {problem}")));
        let there = |file: &str| self.path.join(file).symlink_metadata().is_ok();
        let (result, checkpoint) = (kind_of(&self.path.join(RESULT)), kind_of(&self.path.join(CHECKPOINT)));
        if !force && result.is_some() {
            return refused("already holds a result; add --force to replace it, or choose another --out".into());
        }
        if !force && checkpoint.is_some() {
            return refused("holds an unfinished run: go on with --resume, or add --force to drop it".into());
        }
        let kept = resumable(name).then(|| CHECKPOINT.to_string());
        if let (false, Some(file)) = (force, files_of(name).into_iter().chain(kept).find(|file| there(file))) {
            return refused(format!(
                "holds a file {file} that is not of a run of headflow; add --force to replace it, or choose another --out"
            ));
        }
        self.stale = result.iter().chain(&checkpoint).flat_map(|kind| files_of(kind)).collect();
        // A run with a checkpoint of its own replaces that one itself, and removes it when the result is there.
        if checkpoint.is_some() && !resumable(name) {
            self.stale.push(CHECKPOINT.into());
        }
        Ok(())
    }

    /// Removes what killed processes left of files on their way.
    fn sweep(&self) {
        let [begin, end] = TEMPORARY;
        for entry in fs::read_dir(&self.path).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let ours = name.to_str().is_some_and(|name| name.starts_with(begin) && name.ends_with(end))
                && entry.file_type().is_ok_and(|kind| kind.is_file());
            // Whoever still writes it holds its lock.
            if ours && File::open(entry.path()).is_ok_and(|file| file.try_lock().is_ok()) {
                let _ = fs::remove_file(entry.path());
            }
        }
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
                    return Ok(Self { path, made, stale: Vec::new(), _lock: None });
                }
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(unwritable(&path, &e)),
            }
        }
        Err(Error::unwritable(root.display().to_string(), "has no free number left"))
    }

    /// Folders that were made for this run, the innermost first: to be removed if the process ends before anything is in
    /// them.
    pub fn made(&self) -> &[PathBuf] {
        &self.made
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes arrays that numpy reads.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write_arrays(&mut self, name: &str, arrays: &[(&str, Array3<f32>)]) -> Result<(), Error> {
        self.write(name, |to| {
            let failed = |e: &dyn std::fmt::Display| Error::unwritable(name, e);
            let mut npz = NpzWriter::new_compressed(to);
            arrays.iter().try_for_each(|(name, array)| npz.add_array(*name, array).map_err(|e| failed(&e)))?;
            npz.finish().map_err(|e| failed(&e))?;
            Ok(())
        })
    }

    /// Writes the table, the arrays, and last the document, which was made before anything is written: what cannot be said
    /// leaves nothing behind.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn write_run(&mut self, series: &[Series], replicas: &[Replicas<'_>], document: &Value) -> Result<(), Error> {
        self.write("series.csv", |to| write_csv(series, to))?;
        self.write("series.npz", |to| write_npz(series, replicas, to))?;
        self.write_document(document)
    }

    /// Writes the result document; call it last.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write_document(&mut self, document: &Value) -> Result<(), Error> {
        let text = to_text(document);
        self.write(RESULT, |to| to.write_all(text.as_bytes()).map_err(|e| Error::unwritable(RESULT, e)))
    }

    /// Writes a file of text beside the result.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write_text(&mut self, name: &str, text: &str) -> Result<(), Error> {
        self.write(name, |to| to.write_all(text.as_bytes()).map_err(|e| Error::unwritable(name, e)))
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

    fn write(&mut self, name: &str, content: impl FnOnce(&mut File) -> Result<(), Error>) -> Result<(), Error> {
        let place = self.path.join(name);
        let failed = |e: &dyn std::fmt::Display| Error::unwritable(place.display().to_string(), e);
        let mut file = temporary(&self.path).map_err(|e| failed(&e))?;
        content(file.as_file_mut()).map_err(|error| match error {
            Error::Unwritable { problem, .. } => failed(&problem),
            other => other,
        })?;
        file.as_file().sync_all().map_err(|e| failed(&e))?;
        // What is replaced goes first: a folder with a result.json is whole and of one run. An unfinished run is beside it.
        if name != CHECKPOINT {
            for old in std::mem::take(&mut self.stale) {
                self.remove(&old)?;
            }
        }
        file.persist(&place).map_err(|e| failed(&e.error))?;
        self.made.clear();
        sync(&self.path).map_err(|e| failed(&e))
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
    Error::unwritable(path.display().to_string(), format!("{error}; choose another folder with --out"))
}

/// Whether an open folder is still the one at `path`.
#[cfg(unix)]
fn is_at(folder: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let identity = |metadata: &fs::Metadata| (metadata.dev(), metadata.ino());
    matches!((folder.metadata(), fs::metadata(path)), (Ok(a), Ok(b)) if identity(&a) == identity(&b))
}

#[cfg(not(unix))]
fn is_at(_: &File, path: &Path) -> bool {
    path.exists()
}

/// A new file in `folder` for what is to be renamed, locked while it is there.
fn temporary(folder: &Path) -> io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(TEMPORARY[0]).suffix(TEMPORARY[1]);
    // As readable as the user's mask lets any new file be.
    #[cfg(unix)]
    let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o666);
    #[cfg(unix)]
    builder.permissions(permissions);
    let file = builder.tempfile_in(folder)?;
    // Where files cannot be locked it may be swept up early, and is then an error.
    let _ = file.as_file().try_lock();
    Ok(file)
}

/// Fills a file with as much as a result needs at least, of numbers that no file system compresses.
fn reserve(to: &mut impl Write) -> io::Result<()> {
    let mut state = 1u64;
    let mut bytes = [0u8; 4096];
    for _ in 0..ROOM / bytes.len() {
        for word in bytes.chunks_exact_mut(8) {
            // Knuth's linear congruential generator.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            word.copy_from_slice(&state.to_le_bytes());
        }
        to.write_all(&bytes)?;
    }
    to.flush()
}

/// Brings the names in a folder to the disk, where folders are files that can be.
fn sync(folder: &Path) -> io::Result<()> {
    let Ok(file) = File::open(folder) else { return Ok(()) };
    match file.sync_all() {
        Err(e) if ![io::ErrorKind::InvalidInput, io::ErrorKind::Unsupported].contains(&e.kind()) => Err(e),
        _ => Ok(()),
    }
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
fn write_npz(series: &[Series], replicas: &[Replicas<'_>], to: &mut File) -> Result<(), Error> {
    let failed = |e: &dyn std::fmt::Display| Error::unwritable("series.npz", e);
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
        drop(folder);
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

    /// What lies in a folder, sorted.
    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn document(command: &str) -> Value {
        serde_json::json!({"format": "headflow-result", "command": command})
    }

    /// Files of somebody else's stay, whatever they are called; those of an earlier run go, and only those.
    #[test]
    fn only_files_of_runs_are_replaced() {
        let root = tempfile::tempdir().unwrap();
        let out = root.path();
        for name in ["pruning.png", "phase.svg", "positions.npz", "notes.txt"] {
            fs::write(out.join(name), "mine").unwrap();
        }
        let mut folder = RunFolder::prepare(Some(out), "flow", false).unwrap();
        folder.write_text("series.csv", "old").unwrap();
        folder.write_text("comparison.png", "old").unwrap();
        folder.write_document(&document("flow")).unwrap();
        drop(folder);
        let mut folder = RunFolder::prepare(Some(out), "bayes", true).unwrap();
        assert!(out.join("series.csv").exists(), "what is replaced stays until something replaces it");
        folder.write_document(&document("bayes")).unwrap();
        drop(folder);
        assert_eq!(names(out), ["notes.txt", "phase.svg", "positions.npz", "pruning.png", "result.json"]);
        // A name that the run needs, of somebody else's file.
        fs::remove_file(out.join("result.json")).unwrap();
        fs::write(out.join("series.npz"), "mine").unwrap();
        let error = RunFolder::prepare(Some(out), "flow", false).unwrap_err().to_string();
        assert!(error.contains("series.npz") && error.contains("--force"), "{error}");
        assert_eq!(fs::read_to_string(out.join("series.npz")).unwrap(), "mine");
        assert!(RunFolder::prepare(Some(out), "bayes", false).is_ok());
        // Nor is any document a result.
        fs::write(out.join("result.json"), "{\"format\": \"another\"}").unwrap();
        assert!(RunFolder::prepare(Some(out), "bayes", false).is_err());
        drop(RunFolder::prepare(Some(out), "flow", true).unwrap());
        assert_eq!(fs::read_to_string(out.join("series.npz")).unwrap(), "mine");
    }

    /// An unfinished run stays until its checkpoint is replaced, or its result is there.
    #[test]
    fn an_unfinished_run_outlives_what_comes_before_the_result() {
        let root = tempfile::tempdir().unwrap();
        let out = root.path();
        let checkpoint = |text: &str| serde_json::json!({"format": "headflow-checkpoint", "text": text}).to_string();
        fs::write(out.join(CHECKPOINT), checkpoint("old")).unwrap();
        let error = RunFolder::prepare(Some(out), "simulate", false).unwrap_err().to_string();
        assert!(error.contains("--resume"), "{error}");
        let mut folder = RunFolder::prepare(Some(out), "simulate", true).unwrap();
        folder.write_text("series.csv", "new").unwrap();
        folder.write_document(&document("simulate")).unwrap();
        assert_eq!(fs::read_to_string(out.join(CHECKPOINT)).unwrap(), checkpoint("old"));
        folder.remove(CHECKPOINT).unwrap();
        drop(folder);
        // A run without checkpoints drops it with the rest.
        fs::write(out.join(CHECKPOINT), checkpoint("old")).unwrap();
        let mut folder = RunFolder::prepare(Some(out), "flow", true).unwrap();
        assert!(out.join(CHECKPOINT).exists());
        folder.write_document(&document("flow")).unwrap();
        assert_eq!(names(out), ["result.json"]);
    }

    #[cfg(unix)]
    #[test]
    fn a_folder_is_one_run_s_at_a_time() {
        let root = tempfile::tempdir().unwrap();
        let out = root.path().join("run");
        let first = RunFolder::prepare(Some(&out), "flow", false).unwrap();
        let error = RunFolder::prepare(Some(&out), "flow", true).unwrap_err();
        assert!(matches!(&error, Error::Unwritable { .. }) && error.to_string().contains("another run"), "{error}");
        assert!(out.exists(), "the second does not take the first one's folder away");
        drop(first);
        assert!(!out.exists());
        assert!(RunFolder::prepare(Some(&out), "flow", false).is_ok());
    }

    /// What killed processes leave is swept up; what is being written, and files of others, is not.
    #[test]
    fn leftovers_are_swept_up() {
        let root = tempfile::tempdir().unwrap();
        let out = root.path();
        fs::write(out.join(".headflow-1.tmp"), "left").unwrap();
        fs::write(out.join("notes.tmp"), "mine").unwrap();
        let written = temporary(out).unwrap();
        drop(RunFolder::prepare(Some(out), "flow", false).unwrap());
        let name = written.path().file_name().unwrap().to_str().unwrap().to_string();
        assert_eq!(names(out), [name, "notes.tmp".into()]);
    }

    /// A disk without room is found by the probe, and told as such.
    #[test]
    fn a_full_disk_is_found_before_any_work() {
        struct Full(usize);
        impl Write for Full {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                if self.0 == 0 {
                    return Err(io::ErrorKind::StorageFull.into());
                }
                let some = bytes.len().min(self.0);
                self.0 -= some;
                Ok(some)
            }

            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        assert_eq!(reserve(&mut Full(ROOM - 1)).unwrap_err().kind(), io::ErrorKind::StorageFull);
        reserve(&mut Full(ROOM)).unwrap();
        let error = unwritable(Path::new("x"), &io::ErrorKind::StorageFull.into());
        assert!(matches!(error, Error::Unwritable { .. }), "{error}");
        assert_eq!(error.to_string(), "x: cannot be written: no storage space; choose another folder with --out");
    }

    /// A file that fails on the way leaves the old one, and the words of the system.
    #[test]
    fn a_failed_write_changes_nothing() {
        let root = tempfile::tempdir().unwrap();
        let out = root.path();
        let mut folder = RunFolder::prepare(Some(out), "flow", false).unwrap();
        folder.write_document(&document("flow")).unwrap();
        drop(folder);
        let mut folder = RunFolder::prepare(Some(out), "flow", true).unwrap();
        let full: io::Error = io::ErrorKind::StorageFull.into();
        let error = folder.write("series.csv", |_| Err(Error::unwritable("series.csv", full))).unwrap_err();
        let expected = Error::unwritable(out.join("series.csv").display().to_string(), "no storage space");
        assert_eq!(error, expected);
        assert_eq!(names(out), ["result.json"]);
    }

    #[cfg(unix)]
    #[test]
    fn files_are_as_readable_as_any_new_file() {
        use std::os::unix::fs::PermissionsExt;
        let root = tempfile::tempdir().unwrap();
        let mode = |name: &str| fs::metadata(root.path().join(name)).unwrap().permissions().mode();
        let mut folder = RunFolder::prepare(Some(root.path()), "flow", false).unwrap();
        folder.write_text("series.csv", "x").unwrap();
        fs::write(root.path().join("other"), "x").unwrap();
        assert_eq!(mode("series.csv"), mode("other"));
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
