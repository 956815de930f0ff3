//! The header of a GGUF file (<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>), little-endian:
//!
//! ```text
//! "GGUF", version u32, tensors u64, keys u64,
//! keys    times: key text, type u32, value,
//! tensors times: name text, dimensions u32, so many sizes u64 (the innermost first), format u32, offset u64,
//! ```
//!
//! where a text is its length as `u64` and its bytes, and a list its type as `u32`, its length as `u64` and its
//! values. After the header, at the next multiple of `general.alignment`, stand the tensors.
//!
//! Nothing is believed: every length is checked against the bytes that are left before anything is read, and
//! against what a language model can have before it is held.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;

use headflow_model::text::cut;

/// Bytes of text in a header, some ten times those of the largest vocabularies.
const MOST_TEXT: u64 = 1 << 28;
/// Entries of lists in a header, likewise.
const MOST_ENTRIES: u64 = 1 << 23;
/// Keys, and tensors.
const MOST_NAMES: u64 = 1 << 16;
/// Lists in lists.
const MOST_DEPTH: usize = 4;
/// As ggml.
const MOST_DIMENSIONS: u32 = 4;

/// A value of the metadata.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    /// Of any of the types for whole numbers.
    Whole(i128),
    Number(f64),
    Flag(bool),
    Text(String),
    /// A text that is not UTF-8.
    Bytes,
    List(Vec<Value>),
}

/// A tensor as the header describes it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Entry {
    pub name: String,
    /// The outermost first.
    pub shape: Vec<u64>,
    pub format: u32,
    /// From where the tensors begin.
    pub offset: u64,
}

/// All that stands before the tensors.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Header {
    pub metadata: BTreeMap<String, Value>,
    pub tensors: Vec<Entry>,
    /// The byte after it.
    pub end: u64,
}

/// A name out of a file, as messages quote it.
pub(crate) fn quoted(name: &str) -> String {
    format!("\"{}\"", cut(name, 80))
}

impl Header {
    /// Reads the header of a file of `size` bytes; the error says what is wrong with the file.
    pub fn read(reader: impl Read, size: u64) -> Result<Self, String> {
        let mut source = Source { reader, at: 0, size, text: 0, entries: 0 };
        match source.bytes::<4>() {
            Ok(magic) if &magic == b"GGUF" => {}
            Err(problem) if size >= 4 => return Err(problem),
            _ => return Err("is not a GGUF file".into()),
        }
        match source.u32()? {
            2 | 3 => {}
            1 => return Err("is GGUF of version 1, which is too old: convert the model again".into()),
            other if (1..=3).contains(&other.swap_bytes()) => {
                return Err("is big-endian; only little-endian files can be read: convert the model again".into());
            }
            other => return Err(format!("has a header that cannot be read: GGUF of version {other} (2 and 3 can)")),
        }
        let (tensors, keys) = (source.u64()?, source.u64()?);
        // The fewest bytes that a key and a tensor take.
        source.room(keys.saturating_mul(8 + 4 + 1).saturating_add(tensors.saturating_mul(8 + 4 + 4 + 8)))?;
        for (count, of) in [(keys, "keys"), (tensors, "tensors")] {
            if count > MOST_NAMES {
                return Err(format!("has a header that cannot be read: {count} {of}, more than {MOST_NAMES}"));
            }
        }
        let mut metadata = BTreeMap::new();
        for _ in 0..keys {
            let key = source.name("a key")?;
            let kind = source.u32()?;
            let value = source.value(kind, 0).map_err(|problem| match problem {
                Problem::File(problem) => problem,
                Problem::Value(problem) => format!("has a {} in its metadata that {problem}", quoted(&key)),
            })?;
            if metadata.contains_key(&key) {
                return Err(format!("has {} twice in its metadata", quoted(&key)));
            }
            metadata.insert(key, value);
        }
        let mut entries = Vec::new();
        let mut names = BTreeSet::new();
        for _ in 0..tensors {
            let name = source.name("a tensor")?;
            let dimensions = source.u32()?;
            if dimensions > MOST_DIMENSIONS {
                let name = quoted(&name);
                return Err(format!("tensor {name} has {dimensions} dimensions, more than {MOST_DIMENSIONS}"));
            }
            let mut shape = Vec::new();
            for _ in 0..dimensions {
                shape.push(source.u64()?);
            }
            shape.reverse();
            let entry = Entry { name, shape, format: source.u32()?, offset: source.u64()? };
            if !names.insert(entry.name.clone()) {
                return Err(format!("has the tensor {} twice", quoted(&entry.name)));
            }
            entries.push(entry);
        }
        Ok(Self { metadata, tensors: entries, end: source.at })
    }
}

/// What is wrong, with the file or with the value that is being read.
enum Problem {
    File(String),
    Value(String),
}

impl From<String> for Problem {
    fn from(problem: String) -> Self {
        Self::File(problem)
    }
}

/// What is left of a file.
struct Source<R> {
    reader: R,
    at: u64,
    size: u64,
    /// Bytes of text read so far.
    text: u64,
    /// Entries of lists read so far.
    entries: u64,
}

impl<R: Read> Source<R> {
    /// Whether so many bytes are left.
    fn room(&self, count: u64) -> Result<(), String> {
        let end = self.at.saturating_add(count);
        if end <= self.size {
            return Ok(());
        }
        Err(format!(
            "is truncated or damaged: its header goes on to byte {end} or further, but the file ends at {}",
            self.size
        ))
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], String> {
        self.room(N as u64)?;
        let mut bytes = [0; N];
        self.reader.read_exact(&mut bytes).map_err(|e| format!("cannot be read: {e}"))?;
        self.at += N as u64;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, String> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, String> {
        self.bytes().map(u64::from_le_bytes)
    }

    /// The bytes of a text.
    fn text(&mut self) -> Result<Vec<u8>, String> {
        let length = self.u64()?;
        self.room(length)?;
        self.text += length;
        if self.text > MOST_TEXT {
            return Err(format!("has a header that cannot be read: more than {MOST_TEXT} bytes of text"));
        }
        let mut bytes = vec![0; length as usize];
        self.reader.read_exact(&mut bytes).map_err(|e| format!("cannot be read: {e}"))?;
        self.at += length;
        Ok(bytes)
    }

    /// A key or the name of a tensor.
    fn name(&mut self, what: &str) -> Result<String, String> {
        match String::from_utf8(self.text()?) {
            Ok(name) if !name.is_empty() && !name.contains(char::is_control) => Ok(name),
            _ => Err(format!("is damaged: {what} whose name is not a text of one line, before byte {}", self.at)),
        }
    }

    fn value(&mut self, kind: u32, depth: usize) -> Result<Value, Problem> {
        Ok(match kind {
            0 => Value::Whole(u8::from_le_bytes(self.bytes()?).into()),
            1 => Value::Whole(i8::from_le_bytes(self.bytes()?).into()),
            2 => Value::Whole(u16::from_le_bytes(self.bytes()?).into()),
            3 => Value::Whole(i16::from_le_bytes(self.bytes()?).into()),
            4 => Value::Whole(self.u32()?.into()),
            5 => Value::Whole(i32::from_le_bytes(self.bytes()?).into()),
            6 => Value::Number(f32::from_le_bytes(self.bytes()?).into()),
            7 => match self.bytes()? {
                [0] => Value::Flag(false),
                [1] => Value::Flag(true),
                [other] => return Err(Problem::Value(format!("is neither true nor false but {other}"))),
            },
            8 => {
                let mut bytes = self.text()?;
                // Some writers end texts with zeros.
                while bytes.last() == Some(&0) {
                    bytes.pop();
                }
                String::from_utf8(bytes).map_or(Value::Bytes, Value::Text)
            }
            9 => {
                let (kind, length) = (self.u32()?, self.u64()?);
                if depth == MOST_DEPTH {
                    return Err(Problem::Value(format!("holds lists in lists, more than {MOST_DEPTH} deep")));
                }
                // The fewest bytes that an entry takes.
                let least = match kind {
                    2 | 3 => 2,
                    4..=6 => 4,
                    8 | 10..=12 => 8,
                    9 => 12,
                    _ => 1,
                };
                self.room(length.saturating_mul(least))?;
                self.entries = self.entries.saturating_add(length);
                if self.entries > MOST_ENTRIES {
                    return Err(Problem::Value(format!("brings the entries of all lists to more than {MOST_ENTRIES}")));
                }
                let mut list = Vec::new();
                for _ in 0..length {
                    list.push(self.value(kind, depth + 1)?);
                }
                Value::List(list)
            }
            10 => Value::Whole(self.u64()?.into()),
            11 => Value::Whole(i64::from_le_bytes(self.bytes()?).into()),
            12 => Value::Number(f64::from_le_bytes(self.bytes()?)),
            other => return Err(Problem::Value(format!("is of a type that does not exist, number {other}"))),
        })
    }
}
