//! Llama models in GGUF files (<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>), read and
//! dequantised by the crate `candle-core`.
//!
//! A GGUF llama holds the rows of its query and key matrices in an order in which rotary pairs are the
//! entries `2 k` and `2 k + 1` of a head ([`Pairing::Interleaved`]).

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use candle_core::Device;
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::{Content, Value};

use crate::error::Error;
use crate::llama::{Layer, Llama, Settings};
use crate::rotary::{Pairing, Rotary};

/// Formats of tensors that can be read, by their names in the GGUF specification.
const READABLE: [(GgmlDType, &str); 13] = [
    (GgmlDType::F32, "F32"),
    (GgmlDType::F16, "F16"),
    (GgmlDType::BF16, "BF16"),
    (GgmlDType::Q4_0, "Q4_0"),
    (GgmlDType::Q4_1, "Q4_1"),
    (GgmlDType::Q5_0, "Q5_0"),
    (GgmlDType::Q5_1, "Q5_1"),
    (GgmlDType::Q8_0, "Q8_0"),
    (GgmlDType::Q2K, "Q2_K"),
    (GgmlDType::Q3K, "Q3_K"),
    (GgmlDType::Q4K, "Q4_K"),
    (GgmlDType::Q5K, "Q5_K"),
    (GgmlDType::Q6K, "Q6_K"),
];

/// Names of formats that candle does not know, by their numbers.
const OTHERS: [(u32, &str); 23] = [
    (4, "Q4_2"),
    (5, "Q4_3"),
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
];

/// An open GGUF file: its metadata and tensors.
pub struct File {
    name: String,
    reader: BufReader<fs::File>,
    content: Content,
}

/// The first line of an error of candle's, which can carry a backtrace.
fn first_line(error: &candle_core::Error) -> String {
    error.to_string().lines().next().unwrap_or("unreadable").trim().to_string()
}

impl File {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// [`Error::Unreadable`] when there is no such file, or it is not GGUF, is truncated, holds a tensor in a
    /// format that cannot be read, or a model of another architecture than llama.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let name = path.display().to_string();
        let failed = |problem: String| Error::unreadable(name.clone(), problem);
        let file = fs::File::open(path).map_err(|e| failed(format!("cannot be opened: {e}")))?;
        let size = file.metadata().map_err(|e| failed(format!("cannot be read: {e}")))?.len();
        let mut reader = BufReader::new(file);
        let mut magic = [0; 4];
        let read = reader.read_exact(&mut magic);
        if read.is_err() || &magic != b"GGUF" {
            return Err(failed("is not a GGUF file".into()));
        }
        if zero_alignment(&mut reader).map_err(|e| failed(format!("cannot be read: {e}")))? {
            return Err(failed("has a \"general.alignment\" of 0 in its metadata".into()));
        }
        reader.seek(SeekFrom::Start(0)).map_err(|e| failed(format!("cannot be read: {e}")))?;
        let content = Content::read(&mut reader).map_err(|error| failed(header_problem(&error)))?;
        let mut tensors: Vec<_> = content.tensor_infos.iter().collect();
        tensors.sort_by_key(|(name, _)| *name);
        for (tensor, info) in tensors {
            let format = info.ggml_dtype;
            if !READABLE.iter().any(|(readable, _)| *readable == format) {
                // Candle knows two that are for intermediate results alone.
                let name = if format == GgmlDType::Q8K { "Q8_K" } else { "Q8_1" };
                return Err(failed(unsupported(name, Some(tensor))));
            }
            let needed = info.shape.elem_count() as u64 / format.block_size() as u64 * format.type_size() as u64;
            let start = content.tensor_data_offset.saturating_add(info.offset);
            if start.saturating_add(needed) > size {
                return Err(failed(format!(
                    "is truncated: tensor \"{tensor}\" ends at byte {}, but the file at {size}",
                    start.saturating_add(needed)
                )));
            }
        }
        let file = Self { name, reader, content };
        let architecture = file.required("general.architecture", file.text("general.architecture"))?;
        if architecture != "llama" {
            return Err(
                file.error(format!("is a model of the architecture \"{architecture}\"; only \"llama\" can be run"))
            );
        }
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
        self.content.metadata.get(key)?.to_string().ok().map(String::as_str)
    }

    /// A whole number of the metadata.
    pub fn count(&self, key: &str) -> Option<usize> {
        match self.content.metadata.get(key)? {
            Value::I32(v) => usize::try_from(*v).ok(),
            Value::I64(v) => usize::try_from(*v).ok(),
            value => value.to_u64().ok().and_then(|v| usize::try_from(v).ok()),
        }
    }

    /// A number of the metadata.
    pub fn number(&self, key: &str) -> Option<f64> {
        match self.content.metadata.get(key)? {
            Value::F32(v) => Some(f64::from(*v)),
            Value::F64(v) => Some(*v),
            _ => self.count(key).map(|v| v as f64),
        }
    }

    /// A truth value of the metadata.
    pub fn flag(&self, key: &str) -> Option<bool> {
        self.content.metadata.get(key)?.to_bool().ok()
    }

    /// A list of texts of the metadata.
    pub fn texts(&self, key: &str) -> Option<Vec<&str>> {
        let list = self.content.metadata.get(key)?.to_vec().ok()?;
        list.iter().map(|v| v.to_string().ok().map(String::as_str)).collect()
    }

    /// A list of whole numbers of the metadata.
    pub fn counts(&self, key: &str) -> Option<Vec<i64>> {
        let list = self.content.metadata.get(key)?.to_vec().ok()?;
        let number = |value: &Value| match value {
            Value::I32(v) => Some(i64::from(*v)),
            value => value.to_i64().ok().or_else(|| value.to_u64().ok().and_then(|v| i64::try_from(v).ok())),
        };
        list.iter().map(number).collect()
    }

    fn required<T>(&self, key: &str, value: Option<T>) -> Result<T, Error> {
        value.ok_or_else(|| self.error(format!("has no usable \"{key}\" in its metadata")))
    }

    /// None if the key is not there; an error if it is there and of another kind.
    fn optional<'a, T>(&'a self, key: &str, value: impl Fn(&'a Self, &str) -> Option<T>) -> Result<Option<T>, Error> {
        if self.content.metadata.contains_key(key) { self.required(key, value(self, key)).map(Some) } else { Ok(None) }
    }

    fn required_count(&self, key: &str) -> Result<usize, Error> {
        let count = self.required(key, self.count(key))?;
        // Products of sizes must not overflow.
        if (1..1 << 31).contains(&count) { Ok(count) } else { Err(self.error(format!("\"{key}\" is {count}"))) }
    }

    /// A tensor in single precision, row by row.
    ///
    /// # Errors
    /// [`Error::Unreadable`] when there is no such tensor, or it has another shape.
    pub fn tensor(&mut self, tensor: &str, shape: &[usize]) -> Result<Vec<f32>, Error> {
        let Some(info) = self.content.tensor_infos.get(tensor) else {
            return Err(self.error(format!("has no tensor \"{tensor}\"")));
        };
        let found = info.shape.dims();
        if found != shape {
            return Err(self.error(format!("tensor \"{tensor}\" has the shape {found:?}, but {shape:?} is needed")));
        }
        self.content
            .tensor(&mut self.reader, tensor, &Device::Cpu)
            .and_then(|quantized| quantized.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>())
            .map_err(|error| {
                Error::unreadable(self.name.clone(), format!("tensor \"{tensor}\": {}", first_line(&error)))
            })
    }
}

/// Whether the metadata ask for an alignment of 0, by which candle 0.11 would divide.
fn zero_alignment(reader: &mut BufReader<fs::File>) -> std::io::Result<bool> {
    const KEY: &[u8] = b"\x11\0\0\0\0\0\0\0general.alignment";
    // Headers are smaller than that.
    let mut header = Vec::new();
    reader.take(1 << 26).read_to_end(&mut header)?;
    let place = header.windows(KEY.len()).position(|window| window == KEY);
    // A number of four bytes for its type, then at least one for the value.
    let value = place.and_then(|at| header.get(at + KEY.len() + 4..at + KEY.len() + 8));
    Ok(value.is_some_and(|value| value == [0; 4]))
}

fn header_problem(error: &candle_core::Error) -> String {
    let message = first_line(error);
    if let Some(number) = message.rsplit_once("unknown dtype for tensor ").and_then(|(_, n)| n.parse::<u32>().ok()) {
        let known = OTHERS.iter().find(|(other, _)| *other == number);
        return unsupported(&known.map_or(format!("number {number}"), |(_, name)| (*name).to_string()), None);
    }
    if message.contains("fill whole buffer") || message.contains("remaining") {
        return format!("is truncated or damaged: its header ends early ({message})");
    }
    format!("has a header that cannot be read: {message}")
}

fn unsupported(format: &str, tensor: Option<&str>) -> String {
    let which = tensor.map_or("a tensor".to_string(), |tensor| format!("tensor \"{tensor}\""));
    let readable: Vec<&str> = READABLE.iter().map(|(_, name)| *name).collect();
    format!("{which} has the format {format}, which is not supported ({} are)", readable.join(", "))
}

impl Llama {
    /// Reads a model; `progress` hears of every layer, with their number.
    ///
    /// # Errors
    /// [`Error::Unreadable`] when metadata or tensors are missing or do not fit each other, or when there are
    /// tensors that this architecture does not use; what `progress` returns.
    pub fn read(file: &mut File, progress: &mut dyn FnMut(usize, usize) -> Result<(), Error>) -> Result<Self, Error> {
        let layers = file.required_count("llama.block_count")?;
        // Before anything of the size of a wrong number is made.
        if layers > file.content.tensor_infos.len() {
            return Err(
                file.error(format!("has {} tensors, too few for {layers} layers", file.content.tensor_infos.len()))
            );
        }
        let mut settings = settings(file)?;
        let names: BTreeSet<String> = names(layers).into_iter().collect();
        // Whatever else is there would change the outcome.
        let unknown = file.content.tensor_infos.keys().filter(|name| !names.contains(*name)).min();
        if let Some(unknown) = unknown {
            return Err(file.error(format!("has a tensor \"{unknown}\", which is not part of a plain llama model")));
        }
        if let Some(missing) = names
            .iter()
            .find(|name| !OPTIONAL.contains(&name.as_str()) && !file.content.tensor_infos.contains_key(*name))
        {
            return Err(file.error(format!("has no tensor \"{missing}\"")));
        }
        if file.content.tensor_infos.contains_key(FACTORS) {
            let pairs = settings.rotary.size.unwrap_or(settings.head_size) / 2;
            let factors = file.tensor(FACTORS, &[pairs])?;
            settings.rotary.factors = Some(factors.into_iter().map(f64::from).collect());
        }
        let Settings { embedding: width, heads, key_value_heads, head_size, feed_forward, vocabulary, .. } = settings;
        let (query_width, key_width) = (heads * head_size, key_value_heads * head_size);
        let embedding = file.tensor("token_embd.weight", &[vocabulary, width])?;
        let mut read = Vec::with_capacity(layers);
        for number in 0..layers {
            progress(number, layers)?;
            let mut tensor = |name: &str, shape: &[usize]| file.tensor(&format!("blk.{number}.{name}.weight"), shape);
            read.push(Layer {
                attention_norm: tensor("attn_norm", &[width])?,
                queries: tensor("attn_q", &[query_width, width])?,
                keys: tensor("attn_k", &[key_width, width])?,
                values: tensor("attn_v", &[key_width, width])?,
                output: tensor("attn_output", &[width, query_width])?,
                feed_forward_norm: tensor("ffn_norm", &[width])?,
                gate: tensor("ffn_gate", &[feed_forward, width])?,
                up: tensor("ffn_up", &[feed_forward, width])?,
                down: tensor("ffn_down", &[width, feed_forward])?,
            });
        }
        let final_norm = file.tensor("output_norm.weight", &[width])?;
        let own_logits = file.content.tensor_infos.contains_key(LOGITS);
        let logits = own_logits.then(|| file.tensor(LOGITS, &[vocabulary, width])).transpose()?;
        Ok(Self { settings, embedding, layers: read, final_norm, logits })
    }
}

/// Heads of real models have some hundred numbers.
const MOST_HEAD_SIZE: usize = 65_536;
const LOGITS: &str = "output.weight";
const FACTORS: &str = "rope_freqs.weight";
/// Tensors that need not be there.
const OPTIONAL: [&str; 2] = [LOGITS, FACTORS];

/// Parts of a layer.
const PARTS: [&str; 9] =
    ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"];

fn names(layers: usize) -> Vec<String> {
    let of_layer = |layer: usize| PARTS.iter().map(move |part| format!("blk.{layer}.{part}.weight"));
    let mut names: Vec<String> = (0..layers).flat_map(of_layer).collect();
    names.extend(["token_embd.weight", "output_norm.weight", LOGITS, FACTORS].map(String::from));
    names
}

fn settings(file: &File) -> Result<Settings, Error> {
    let count = |key: &str| file.required_count(&format!("llama.{key}"));
    let (embedding, heads) = (count("embedding_length")?, count("attention.head_count")?);
    let key_value_heads = match file.optional("llama.attention.head_count_kv", File::count)? {
        Some(_) => count("attention.head_count_kv")?,
        None => heads,
    };
    if !heads.is_multiple_of(key_value_heads) {
        return Err(file.error(format!("{key_value_heads} key-value heads do not divide {heads} heads")));
    }
    let head_size = match file.optional("llama.attention.key_length", File::count)? {
        Some(size) if (1..=MOST_HEAD_SIZE).contains(&size) => size,
        Some(size) => return Err(file.error(format!("\"llama.attention.key_length\" is {size}"))),
        None if embedding.is_multiple_of(heads) => embedding / heads,
        None => return Err(file.error(format!("an embedding of {embedding} cannot be shared by {heads} heads"))),
    };
    if file.optional("llama.attention.value_length", File::count)?.is_some_and(|size| size != head_size)
        || head_size == 0
    {
        return Err(file.error("has keys and values of different sizes, which is not supported"));
    }
    for key in ["llama.rope.scaling.factor", "llama.rope.scale_linear"] {
        if file.optional(key, File::number)?.is_some_and(|factor| factor != 0.0 && factor != 1.0) {
            return Err(file.error(format!("has a \"{key}\", which is not supported")));
        }
    }
    for key in ["llama.expert_count", "llama.attention.sliding_window"] {
        if file.optional(key, File::count)?.is_some_and(|count| count > 0) {
            return Err(file.error(format!("has a \"{key}\", which is not part of a plain llama model")));
        }
    }
    let scaling = file.optional("llama.rope.scaling.type", |file, key| file.text(key))?.unwrap_or("none");
    if scaling != "none" {
        return Err(file.error(format!("scales rotary embeddings by \"{scaling}\", which is not supported")));
    }
    let rotary = Rotary {
        base: file.optional("llama.rope.freq_base", File::number)?.unwrap_or(10_000.0),
        size: Some(file.optional("llama.rope.dimension_count", File::count)?.unwrap_or(head_size)),
        pairing: Pairing::Interleaved,
        factors: None,
    };
    // Refused here rather than in the middle of a run.
    rotary.turns::<f32>(1, head_size).map_err(|error| file.error(error))?;
    let epsilon = "llama.attention.layer_norm_rms_epsilon";
    let vocabulary = match file.content.tensor_infos.get("token_embd.weight").map(|info| info.shape.dims()) {
        Some(&[vocabulary, _]) if (1..1 << 31).contains(&vocabulary) => vocabulary,
        Some(_) => return Err(file.error("tensor \"token_embd.weight\" is not a matrix")),
        None => return Err(file.error("has no tensor \"token_embd.weight\"")),
    };
    Ok(Settings {
        embedding,
        heads,
        key_value_heads,
        head_size,
        feed_forward: count("feed_forward_length")?,
        vocabulary,
        context: count("context_length")?,
        rotary,
        epsilon: file.required(epsilon, file.number(epsilon).filter(|e| e.is_finite() && *e >= 0.0))?,
    })
}
