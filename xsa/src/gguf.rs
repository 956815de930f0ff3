//! Llama models in GGUF files: the header is read and checked here (`header`), the tensors are dequantised by
//! the crate `candle-core`, and `model` makes a [`crate::Llama`] of them.
//!
//! A file says many things that change what a model computes. Keys and tensors that are read are known by name;
//! any other that belongs to the model or its tokenizer is refused by name, so that nothing is ignored.

mod header;
mod model;

use std::collections::BTreeMap;
use std::fs;
use std::io::BufReader;
use std::path::Path;

use candle_core::Device;
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::TensorInfo;

pub(crate) use self::header::quoted;
use self::header::{Entry, Header, Value};
use crate::error::Error;

/// Formats of tensors, by their numbers and names in the GGUF specification; those that can be read with candle's
/// own name.
const FORMATS: [(u32, &str, Option<GgmlDType>); 42] = [
    (0, "F32", Some(GgmlDType::F32)),
    (1, "F16", Some(GgmlDType::F16)),
    (30, "BF16", Some(GgmlDType::BF16)),
    (2, "Q4_0", Some(GgmlDType::Q4_0)),
    (3, "Q4_1", Some(GgmlDType::Q4_1)),
    (6, "Q5_0", Some(GgmlDType::Q5_0)),
    (7, "Q5_1", Some(GgmlDType::Q5_1)),
    (8, "Q8_0", Some(GgmlDType::Q8_0)),
    (10, "Q2_K", Some(GgmlDType::Q2K)),
    (11, "Q3_K", Some(GgmlDType::Q3K)),
    (12, "Q4_K", Some(GgmlDType::Q4K)),
    (13, "Q5_K", Some(GgmlDType::Q5K)),
    (14, "Q6_K", Some(GgmlDType::Q6K)),
    (4, "Q4_2", None),
    (5, "Q4_3", None),
    // These two are for intermediate results.
    (9, "Q8_1", None),
    (15, "Q8_K", None),
    (16, "IQ2_XXS", None),
    (17, "IQ2_XS", None),
    (18, "IQ3_XXS", None),
    (19, "IQ1_S", None),
    (20, "IQ4_NL", None),
    (21, "IQ3_S", None),
    (22, "IQ2_S", None),
    (23, "IQ4_XS", None),
    (24, "I8", None),
    (25, "I16", None),
    (26, "I32", None),
    (27, "I64", None),
    (28, "F64", None),
    (29, "IQ1_M", None),
    (31, "Q4_0_4_4", None),
    (32, "Q4_0_4_8", None),
    (33, "Q4_0_8_8", None),
    (34, "TQ1_0", None),
    (35, "TQ2_0", None),
    (36, "IQ4_NL_4_4", None),
    (37, "IQ4_NL_4_8", None),
    (38, "IQ4_NL_8_8", None),
    (39, "MXFP4", None),
    (40, "NVFP4", None),
    (41, "Q1_0", None),
];

/// Where tensors begin is a multiple of this, unless a file says otherwise.
const ALIGNMENT: u64 = 32;

/// The version of the quantised formats that candle reads.
const QUANTIZATION: usize = 2;

/// A tensor of an open file.
struct Tensor {
    format: GgmlDType,
    /// The outermost first.
    shape: Vec<usize>,
    /// The product of the shape.
    numbers: u64,
    /// Its first byte in the file.
    start: u64,
    /// The byte after it.
    end: u64,
}

impl Tensor {
    /// Whether it has the shape that is needed.
    fn check(&self, name: &str, shape: &[usize]) -> Result<(), String> {
        if self.shape == shape {
            return Ok(());
        }
        Err(format!("tensor \"{name}\" has the shape {:?}, but {shape:?} is needed", self.shape))
    }
}

/// An open GGUF file: its metadata and tensors.
pub struct File {
    name: String,
    reader: BufReader<fs::File>,
    metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, Tensor>,
}

/// The first line of an error of candle's, which can carry a backtrace.
fn first_line(error: &candle_core::Error) -> String {
    error.to_string().lines().next().unwrap_or("unreadable").trim().to_string()
}

impl File {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// [`Error::Unreadable`] when there is no such file, or it is not little-endian GGUF of version 2 or 3, is
    /// truncated or contradicts itself (a key or tensor twice, tensors that overlap or do not stand where they can),
    /// is one part of several, holds a tensor in a format that cannot be read, or anything but a llama model.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let name = path.display().to_string();
        let failed = |problem: String| Error::unreadable(name.clone(), problem);
        let described = fs::metadata(path).map_err(|e| failed(format!("cannot be opened: {e}")))?;
        // To open a pipe would wait for its writer.
        if !described.is_file() {
            return Err(failed("is not a file".into()));
        }
        let file = fs::File::open(path).map_err(|e| failed(format!("cannot be opened: {e}")))?;
        let size = file.metadata().map_err(|e| failed(format!("cannot be read: {e}")))?.len();
        let mut reader = BufReader::new(file);
        let Header { metadata, tensors, end } = Header::read(&mut reader, size).map_err(failed)?;
        let mut file = Self { name, reader, metadata, tensors: BTreeMap::new() };
        file.check_kind()?;
        let begin = file.first_tensor(end)?;
        for entry in tensors {
            let tensor = placed(&entry, begin, file.alignment()?, size).map_err(|problem| file.error(problem))?;
            file.tensors.insert(entry.name, tensor);
        }
        file.check_overlaps()?;
        file.check_quantization()?;
        Ok(file)
    }

    /// The file's name, as it was given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// An error of this file.
    pub(crate) fn error(&self, problem: impl ToString) -> Error {
        Error::unreadable(self.name.clone(), problem)
    }

    /// A text of the metadata.
    pub fn text(&self, key: &str) -> Option<&str> {
        if let Value::Text(text) = self.metadata.get(key)? { Some(text) } else { None }
    }

    /// A whole number of the metadata.
    pub fn count(&self, key: &str) -> Option<usize> {
        if let Value::Whole(number) = self.metadata.get(key)? { usize::try_from(*number).ok() } else { None }
    }

    /// A number of the metadata.
    pub fn number(&self, key: &str) -> Option<f64> {
        match self.metadata.get(key)? {
            Value::Number(number) => Some(*number),
            Value::Whole(number) => Some(*number as f64),
            _ => None,
        }
    }

    /// A truth value of the metadata.
    pub fn flag(&self, key: &str) -> Option<bool> {
        if let Value::Flag(flag) = self.metadata.get(key)? { Some(*flag) } else { None }
    }

    /// A list of texts of the metadata.
    pub fn texts(&self, key: &str) -> Option<Vec<&str>> {
        let Value::List(list) = self.metadata.get(key)? else { return None };
        list.iter().map(|value| if let Value::Text(text) = value { Some(text.as_str()) } else { None }).collect()
    }

    /// A list of whole numbers of the metadata.
    pub fn counts(&self, key: &str) -> Option<Vec<i64>> {
        let Value::List(list) = self.metadata.get(key)? else { return None };
        let number = |value: &Value| if let Value::Whole(n) = value { i64::try_from(*n).ok() } else { None };
        list.iter().map(number).collect()
    }

    pub(crate) fn required<T>(&self, key: &str, value: Option<T>) -> Result<T, Error> {
        value.ok_or_else(|| self.error(format!("has no usable \"{key}\" in its metadata")))
    }

    /// None if the key is not there; an error if it is there and of another kind.
    pub(crate) fn optional<'a, T>(
        &'a self,
        key: &str,
        value: impl Fn(&'a Self, &str) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        if self.metadata.contains_key(key) { self.required(key, value(self, key)).map(Some) } else { Ok(None) }
    }

    /// Refuses keys that begin with `prefix` unless they are `known`, or `neutral` with the value that changes
    /// nothing.
    pub(crate) fn check_keys(&self, prefix: &str, known: &[&str], neutral: &[(&str, Neutral)]) -> Result<(), Error> {
        for (key, value) in self.metadata.range(prefix.to_string()..) {
            let Some(name) = key.strip_prefix(prefix) else { break };
            let changes_nothing = |(of, at): &(&str, Neutral)| *of == name && at.is(value);
            // An entry that ends in a dot stands for all keys below it.
            let below = |known: &&str| known.ends_with('.') && name.starts_with(*known);
            if !known.iter().any(|known| *known == name || below(known)) && !neutral.iter().any(changes_nothing) {
                let value = match value {
                    Value::Whole(number) => format!(" of {number}"),
                    Value::Number(number) => format!(" of {number:e}"),
                    Value::Flag(flag) => format!(" of {flag}"),
                    Value::Text(text) => format!(" of {}", quoted(text)),
                    Value::Bytes | Value::List(_) => String::new(),
                };
                return Err(self.error(format!(
                    "has a {}{value} in its metadata, which is not supported: what it changes would be ignored",
                    quoted(key)
                )));
            }
        }
        Ok(())
    }

    /// Whether this is a whole model of a kind that can be run.
    fn check_kind(&self) -> Result<(), Error> {
        if let Some(parts) = self.optional("split.count", Self::count)?.filter(|parts| *parts > 1) {
            let part =
                self.optional("split.no", Self::count)?.map_or("one".into(), |k| format!("{}", k.saturating_add(1)));
            return Err(self.error(format!(
                "is part {part} of {parts}: merge the parts first, by llama.cpp's \"gguf-split --merge FIRST-PART MERGED\""
            )));
        }
        let architecture = self.required("general.architecture", self.text("general.architecture"))?;
        if architecture != "llama" {
            return Err(self
                .error(format!("is a model of the architecture {}; only \"llama\" can be run", quoted(architecture))));
        }
        match self.optional("general.type", Self::text)? {
            None | Some("model") => Ok(()),
            Some(kind) => Err(self.error(format!("is of the type {}, not a model", quoted(kind)))),
        }
    }

    fn alignment(&self) -> Result<u64, Error> {
        const KEY: &str = "general.alignment";
        let Some(alignment) = self.optional(KEY, Self::count)? else { return Ok(ALIGNMENT) };
        if alignment.is_power_of_two() {
            Ok(alignment as u64)
        } else {
            Err(self.error(format!("has a \"{KEY}\" of {alignment} in its metadata, which is not a power of two")))
        }
    }

    /// Where the tensors begin when the header ends at `end`.
    fn first_tensor(&self, end: u64) -> Result<u64, Error> {
        let alignment = self.alignment()?;
        end.checked_next_multiple_of(alignment)
            .ok_or_else(|| self.error(format!("has a \"general.alignment\" of {alignment} in its metadata")))
    }

    fn check_overlaps(&self) -> Result<(), Error> {
        let mut places: Vec<_> = self.tensors.iter().map(|(name, t)| (t.start, t.end, name)).collect();
        places.sort_unstable();
        match places.windows(2).find(|pair| pair[0].1 > pair[1].0) {
            Some(pair) => Err(self.error(format!(
                "is damaged: tensors {} and {} overlap from byte {}",
                quoted(pair[0].2),
                quoted(pair[1].2),
                pair[1].0
            ))),
            None => Ok(()),
        }
    }

    /// The formats that pack numbers into blocks had another layout before.
    fn check_quantization(&self) -> Result<(), Error> {
        const KEY: &str = "general.quantization_version";
        let Some(version) = self.optional(KEY, Self::count)? else { return Ok(()) };
        if version != QUANTIZATION && self.tensors.values().any(|tensor| tensor.format.block_size() > 1) {
            return Err(self.error(format!("has a \"{KEY}\" of {version}; only {QUANTIZATION} can be read")));
        }
        Ok(())
    }

    /// A tensor in single precision, row by row.
    ///
    /// # Errors
    /// [`Error::Unreadable`] when there is no such tensor, or it has another shape.
    pub fn tensor(&mut self, tensor: &str, shape: &[usize]) -> Result<Vec<f32>, Error> {
        let Some(found) = self.tensors.get(tensor) else {
            return Err(self.error(format!("has no tensor \"{tensor}\"")));
        };
        found.check(tensor, shape).map_err(|problem| self.error(problem))?;
        TensorInfo { ggml_dtype: found.format, shape: found.shape.clone().into(), offset: 0 }
            .read(&mut self.reader, found.start, &Device::Cpu)
            .and_then(|quantized| quantized.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>())
            .map_err(|error| {
                Error::unreadable(self.name.clone(), format!("tensor \"{tensor}\": {}", first_line(&error)))
            })
    }
}

/// A value of the metadata that changes nothing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Neutral {
    Number(f64),
    Flag(bool),
    Text(&'static str),
}

impl Neutral {
    fn is(self, value: &Value) -> bool {
        match (self, value) {
            (Self::Number(neutral), Value::Whole(number)) => *number as f64 == neutral,
            (Self::Number(neutral), Value::Number(number)) => *number == neutral,
            (Self::Flag(neutral), Value::Flag(flag)) => *flag == neutral,
            (Self::Text(neutral), Value::Text(text)) => text == neutral,
            _ => false,
        }
    }
}

/// A tensor of the header in its place, where tensors begin at `begin` and the file ends at `size`.
fn placed(entry: &Entry, begin: u64, alignment: u64, size: u64) -> Result<Tensor, String> {
    let name = quoted(&entry.name);
    let known = FORMATS.iter().find(|(number, ..)| *number == entry.format);
    let Some(&(.., Some(format))) = known else {
        let format = known.map_or(format!("number {}", entry.format), |(_, name, _)| (*name).to_string());
        let readable: Vec<&str> = FORMATS.iter().filter(|f| f.2.is_some()).map(|f| f.1).collect();
        let readable = readable.join(", ");
        return Err(format!("tensor {name} has the format {format}, which is not supported ({readable} are)"));
    };
    let shape = &entry.shape;
    let too_large = || format!("is damaged: tensor {name} has the shape {shape:?}, too large for any file");
    let numbers = shape.iter().try_fold(1u64, |product, n| product.checked_mul(*n)).ok_or_else(too_large)?;
    if numbers == 0 {
        return Err(format!("is damaged: tensor {name} has the shape {shape:?}, so no numbers"));
    }
    let row = shape.last().copied().unwrap_or(1);
    let block = format.block_size() as u64;
    if !row.is_multiple_of(block) {
        return Err(format!("is damaged: tensor {name} has rows of {row} numbers, which are no blocks of {block}"));
    }
    let bytes = (numbers / block).checked_mul(format.type_size() as u64).ok_or_else(too_large)?;
    if !entry.offset.is_multiple_of(alignment) {
        return Err(format!(
            "is damaged: tensor {name} has the offset {}, which is no multiple of the alignment {alignment}",
            entry.offset
        ));
    }
    let start = begin.saturating_add(entry.offset);
    let end = start.saturating_add(bytes);
    if end > size {
        return Err(format!("is truncated: tensor {name} ends at byte {end}, but the file at {size}"));
    }
    let shape = shape.iter().map(|n| usize::try_from(*n).map_err(|_| too_large())).collect::<Result<_, _>>()?;
    Ok(Tensor { format, shape, numbers, start, end })
}
