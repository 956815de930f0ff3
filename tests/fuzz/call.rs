//! One call of the program: its words, its files, and how it went.
//!
//! A call is a child process in an empty folder with 2 GiB of address space. It is asked to stop, as by Ctrl-C, when it
//! has worked for ten seconds.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// KiB of address space that a call has: 2 GiB.
const SPACE: u64 = 2 << 20;

/// How long a call may work: in seconds of the clock, and of processors, so that a busy machine fails nobody.
pub const SECONDS: f64 = 10.0;

/// How long it may take by the clock alone.
const MOST_SECONDS: f64 = 90.0;

/// How long a call that was asked to stop may take to do so, likewise.
const STOPPING: f64 = 2.0;

/// Most of an output that is read: numbers of longer ones are not looked at.
const MOST_OUTPUT: u64 = 256 << 20;

/// Words of a command line that go together: a flag and its value.
pub type Words = Vec<String>;

/// A field of a spec file: its name, and its value as the text of the file has it.
pub type Entry = (String, String);

/// A call of the program.
#[derive(Debug, Clone, Default)]
pub struct Call {
    /// The command, like `xsa bias`.
    pub command: Words,
    /// Its flags.
    pub flags: Vec<Words>,
    /// Fields that come by a file: what is written before them, and the fields.
    pub file: Option<(String, Vec<Entry>)>,
    /// Files that lie in the folder, and what they hold.
    pub files: Vec<(String, Vec<u8>)>,
}

/// How a call went.
#[derive(Debug)]
pub struct Outcome {
    pub status: ExitStatus,
    pub output: String,
    pub error: String,
    /// Whether `output` is but the beginning of what it wrote.
    pub cut: bool,
    pub seconds: f64,
    /// The most memory that was seen in use, in bytes: it is looked at every few milliseconds.
    pub memory: u64,
    /// Whether it worked too long, was asked to stop, and stopped: after how many seconds.
    pub stopped: Option<f64>,
    /// It did not stop, and was ended.
    pub killed: bool,
    /// Files that were there before, and after.
    pub before: BTreeSet<PathBuf>,
    pub after: BTreeSet<PathBuf>,
    /// Where the files are.
    pub folder: tempfile::TempDir,
}

impl Call {
    pub fn is(&self, command: &str) -> bool {
        self.command.first().is_some_and(|c| c == command)
    }

    pub fn flag(&self, name: &str) -> bool {
        self.flags.iter().any(|words| words[0] == name)
    }

    /// The same call with further words.
    pub fn with(&self, words: &[&str]) -> Self {
        let mut call = self.clone();
        call.flags.push(words.iter().map(|w| w.to_string()).collect());
        call
    }

    /// The text of the spec file.
    fn spec(&self) -> Option<String> {
        let (before, fields) = self.file.as_ref()?;
        let fields: Vec<String> = fields.iter().map(|(name, value)| format!("\"{name}\": {value}")).collect();
        Some(format!("{before}{{{}}}", fields.join(", ")))
    }

    /// All words after the program's name.
    pub fn words(&self) -> Words {
        let file = self.file.iter().flat_map(|_| ["--spec".to_string(), "spec.json".to_string()]);
        self.command.iter().cloned().chain(file).chain(self.flags.iter().flatten().cloned()).collect()
    }

    /// As a person would type it.
    pub fn line(&self) -> String {
        let quote = |word: &String| {
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=+:,".contains(c);
            if !word.is_empty() && word.chars().all(plain) {
                word.clone()
            } else {
                format!("'{}'", word.replace('\'', "'\\''"))
            }
        };
        let mut line = format!("headflow {}", self.words().iter().map(quote).collect::<Vec<_>>().join(" "));
        if let Some(text) = self.spec() {
            line += &format!("   with spec.json: {text}");
        }
        for (name, content) in self.files.iter().filter(|(_, content)| content.len() < 200) {
            line += &format!("   with {name}: {}", String::from_utf8_lossy(content));
        }
        line
    }

    /// Runs `program`.
    pub fn run(&self, program: &str) -> Outcome {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().join("work");
        fs::create_dir(&at).unwrap();
        for (name, content) in &self.files {
            let path = at.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        if let Some(text) = self.spec() {
            fs::write(at.join("spec.json"), text).unwrap();
        }
        let before = listing(&at);
        let streams = ["output", "error"].map(|name| folder.path().join(name));
        let mut child = Command::new("sh")
            .args(["-c", &format!("ulimit -c 0; ulimit -v {SPACE}; exec \"$0\" \"$@\""), program])
            .args(self.words())
            .current_dir(&at)
            .stdin(Stdio::null())
            .stdout(File::create(&streams[0]).unwrap())
            .stderr(File::create(&streams[1]).unwrap())
            .spawn()
            .unwrap();
        let mut watch = Watched::new();
        let mut status = watch.wait(&mut child, SECONDS, MOST_SECONDS);
        let (mut stopped, mut killed) = (None, false);
        let seconds = watch.begin.elapsed().as_secs_f64();
        if status.is_none() {
            signal("INT", &child);
            let from = Instant::now();
            let used = watch.processor;
            status = watch.wait_since(&mut child, from, used, STOPPING, MOST_SECONDS);
            stopped = Some(from.elapsed().as_secs_f64());
        }
        let status = status.unwrap_or_else(|| {
            killed = true;
            signal("KILL", &child);
            child.wait().unwrap()
        });
        let cut = fs::metadata(&streams[0]).unwrap().len() > MOST_OUTPUT;
        let [output, error] = streams.map(|path| {
            let mut bytes = Vec::new();
            File::open(path).unwrap().take(MOST_OUTPUT).read_to_end(&mut bytes).unwrap();
            String::from_utf8_lossy(&bytes).into_owned()
        });
        let after = listing(&at);
        Outcome { status, output, error, cut, seconds, memory: watch.memory, stopped, killed, before, after, folder }
    }
}

impl Outcome {
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }

    pub fn signal(&self) -> Option<i32> {
        self.status.signal()
    }
}

fn signal(name: &str, child: &Child) {
    // It may have ended by itself in between.
    let _ = Command::new("sh").args(["-c", &format!("kill -{name} {}", child.id())]).stderr(Stdio::null()).status();
}

/// A child that is waited for.
struct Watched {
    begin: Instant,
    memory: u64,
    /// Seconds of processors.
    processor: f64,
}

impl Watched {
    fn new() -> Self {
        Self { begin: Instant::now(), memory: 0, processor: 0.0 }
    }

    fn wait(&mut self, child: &mut Child, seconds: f64, most: f64) -> Option<ExitStatus> {
        self.wait_since(child, self.begin, 0.0, seconds, most)
    }

    /// Waits until it ends, or has taken `seconds` both of the clock and of processors, or `most` of the clock.
    fn wait_since(
        &mut self,
        child: &mut Child,
        from: Instant,
        used: f64,
        seconds: f64,
        most: f64,
    ) -> Option<ExitStatus> {
        let mut pause = 1;
        loop {
            if let Some(status) = child.try_wait().unwrap() {
                return Some(status);
            }
            self.look(child.id());
            let clock = from.elapsed().as_secs_f64();
            if clock > most || clock > seconds && self.processor - used > 0.8 * seconds {
                return None;
            }
            std::thread::sleep(Duration::from_millis(pause));
            pause = (pause + 1).min(20);
        }
    }

    fn look(&mut self, id: u32) {
        let read = |name: &str| fs::read_to_string(format!("/proc/{id}/{name}")).unwrap_or_default();
        let peak = read("status").lines().find_map(|l| l.strip_prefix("VmHWM:").map(str::to_string));
        let kilobytes = peak.and_then(|l| l.trim().strip_suffix(" kB").and_then(|n| n.trim().parse::<u64>().ok()));
        self.memory = self.memory.max(kilobytes.unwrap_or(0) << 10);
        // Fields 14 and 15 after the name in brackets: ticks of 10 ms in the program and in the system.
        let stat = read("stat");
        let ticks: Option<f64> = stat.rsplit_once(')').and_then(|(_, rest)| {
            let fields: Vec<&str> = rest.split_whitespace().collect();
            Some(fields.get(11)?.parse::<f64>().ok()? + fields.get(12)?.parse::<f64>().ok()?)
        });
        self.processor = self.processor.max(ticks.unwrap_or(0.0) / 100.0);
    }
}

/// Every file and folder below `at`.
fn listing(at: &Path) -> BTreeSet<PathBuf> {
    let mut all = BTreeSet::new();
    let mut open = vec![at.to_path_buf()];
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                open.push(path.clone());
            }
            all.insert(path.strip_prefix(at).unwrap().to_path_buf());
        }
    }
    all
}
