//! A [`Llama`] from a GGUF file: which keys and tensors it has, and what it takes to run it.
//!
//! A GGUF llama holds the rows of its query and key matrices in an order in which rotary pairs are the
//! entries `2 k` and `2 k + 1` of a head ([`Pairing::Interleaved`]). Linear scaling by a factor `f` turns the
//! token at position `p` as if it stood at `p / f`.

use std::collections::BTreeMap;

use super::{File, Neutral, quoted};
use crate::error::Error;
use crate::llama::{Biases, Layer, Llama, Settings, TOKENS_AT_ONCE};
use crate::rotary::{Pairing, Rotary};

/// Keys that are read below, and those that tell of the model's making alone.
const KNOWN: [&str; 17] = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scale_linear",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
];

/// Keys of what these models do not have, with the value by which a file says so.
const NEUTRAL: [(&str, Neutral); 17] = [
    ("attention.causal", Neutral::Flag(true)),
    ("attention.sliding_window", Neutral::Number(0.0)),
    ("attention.max_alibi_bias", Neutral::Number(0.0)),
    ("attention.clamp_kqv", Neutral::Number(0.0)),
    ("attn_logit_softcapping", Neutral::Number(0.0)),
    ("final_logit_softcapping", Neutral::Number(0.0)),
    ("expert_count", Neutral::Number(0.0)),
    ("expert_used_count", Neutral::Number(0.0)),
    ("expert_shared_count", Neutral::Number(0.0)),
    ("leading_dense_block_count", Neutral::Number(0.0)),
    ("pooling_type", Neutral::Number(0.0)),
    ("use_parallel_residual", Neutral::Flag(false)),
    ("embedding_scale", Neutral::Number(1.0)),
    ("residual_scale", Neutral::Number(1.0)),
    ("logit_scale", Neutral::Number(1.0)),
    ("rope.scaling.attn_factor", Neutral::Number(1.0)),
    // The order that the matrices are in, after the files they came from.
    ("tensor_data_layout", Neutral::Text("Meta AI original pth")),
];

/// Heads of real models have some hundred numbers.
const MOST_HEAD_SIZE: usize = 65_536;
const EMBEDDING: &str = "token_embd.weight";
const FINAL_NORM: &str = "output_norm.weight";
const LOGITS: &str = "output.weight";
const FACTORS: &str = "rope_freqs.weight";

/// The shape of a tensor, and whether a model must have it.
type Place = (Vec<usize>, bool);

/// All tensors that a model can have.
fn layout(settings: &Settings, layers: usize) -> BTreeMap<String, Place> {
    let Settings { embedding: width, heads, key_value_heads, head_size, feed_forward, vocabulary, .. } = *settings;
    let (query_width, key_width) = (heads * head_size, key_value_heads * head_size);
    let of_layer: [(&str, &[usize], bool); 13] = [
        ("attn_norm.weight", &[width], true),
        ("attn_q.weight", &[query_width, width], true),
        ("attn_k.weight", &[key_width, width], true),
        ("attn_v.weight", &[key_width, width], true),
        ("attn_output.weight", &[width, query_width], true),
        ("attn_q.bias", &[query_width], false),
        ("attn_k.bias", &[key_width], false),
        ("attn_v.bias", &[key_width], false),
        ("attn_output.bias", &[width], false),
        ("ffn_norm.weight", &[width], true),
        ("ffn_gate.weight", &[feed_forward, width], true),
        ("ffn_up.weight", &[feed_forward, width], true),
        ("ffn_down.weight", &[width, feed_forward], true),
    ];
    let of_layer = &of_layer;
    let in_layer = |layer| {
        of_layer.iter().map(move |&(name, shape, needed)| (format!("blk.{layer}.{name}"), (shape.to_vec(), needed)))
    };
    let mut all: BTreeMap<String, Place> = (0..layers).flat_map(in_layer).collect();
    all.insert(EMBEDDING.into(), (vec![vocabulary, width], true));
    all.insert(FINAL_NORM.into(), (vec![width], true));
    all.insert(LOGITS.into(), (vec![vocabulary, width], false));
    all.insert(FACTORS.into(), (vec![settings.rotary.size.unwrap_or(head_size) / 2], false));
    all
}

/// What a file says of its model, checked against the tensors it holds.
struct Plan {
    settings: Settings,
    layers: usize,
    layout: BTreeMap<String, Place>,
    /// By which linear scaling divides positions.
    scaling: f64,
}

impl Plan {
    fn of(file: &File) -> Result<Self, Error> {
        file.check_keys("llama.", &KNOWN, &NEUTRAL)?;
        let layers = file.required_count("llama.block_count")?;
        // Before anything of the size of a wrong number is made.
        if layers > file.tensors.len() {
            return Err(file.error(format!("has {} tensors, too few for {layers} layers", file.tensors.len())));
        }
        let scaling = scaling(file)?;
        let settings = settings(file, layers)?;
        let layout = layout(&settings, layers);
        // Whatever else is there would change the outcome.
        if let Some(unknown) = file.tensors.keys().find(|name| !layout.contains_key(*name)) {
            return Err(
                file.error(format!("has a tensor {}, which is not part of a plain llama model", quoted(unknown)))
            );
        }
        for (name, (shape, needed)) in &layout {
            match file.tensors.get(name) {
                Some(tensor) => tensor.check(name, shape).map_err(|problem| file.error(problem))?,
                None if *needed => return Err(file.error(format!("has no tensor \"{name}\""))),
                None => {}
            }
        }
        Ok(Self { settings, layers, layout, scaling })
    }

    /// Bytes that it takes at most to hold the weights and to measure every head on `tokens` tokens.
    fn memory(&self, file: &File, tokens: usize) -> f64 {
        let weights: f64 = file.tensors.values().map(|tensor| 4.0 * tensor.numbers as f64).sum();
        // Beside the weights themselves: bytes and blocks at once, then blocks and numbers of candle's.
        let reading = |tensor: &super::Tensor| {
            let (bytes, numbers) = ((tensor.end - tensor.start) as f64, 4.0 * tensor.numbers as f64);
            bytes + bytes.max(numbers)
        };
        let largest = headflow_model::largest_size(file.tensors.values().map(reading));
        let Settings { embedding, heads, key_value_heads, head_size, feed_forward, vocabulary, .. } = self.settings;
        let [width, heads, groups, size, hidden, vocabulary, layers] =
            [embedding, heads, key_value_heads, head_size, feed_forward, vocabulary, self.layers].map(|n| n as f64);
        // States and their norms; queries and outputs, keys and values, and as many again inside attention; the
        // feed-forward layer; rotations. In double precision: unit values, the columns of a layer twice.
        let single = 3.0 * width + 4.0 * heads * size + 6.0 * groups * size + 2.0 * hidden + size;
        let double = groups * size + 22.0 * heads;
        // Kept until the end: the measurement in double precision, its arrays in single precision.
        let kept = layers * (8.0 * (11.0 * heads + 2.0 * groups) + 4.0 * 8.0 * heads);
        let of_token = 4.0 * single + 8.0 * double + kept;
        weights + largest + tokens as f64 * of_token + 4.0 * TOKENS_AT_ONCE.min(tokens) as f64 * vocabulary
    }
}

impl Llama {
    /// Whether the model in a file can be read and measured on `tokens` within `memory` bytes, found out before it
    /// is loaded.
    ///
    /// # Errors
    /// [`Error::TooCostly`] when it needs more; as [`Llama::read`] for all but the numbers in its tensors, and as
    /// [`Llama::check_tokens`].
    pub fn check(file: &File, tokens: &[u32], memory: u64) -> Result<(), Error> {
        let plan = Plan::of(file)?;
        plan.settings.check_tokens(tokens)?;
        let needed = plan.memory(file, tokens.len());
        if needed <= memory as f64 {
            return Ok(());
        }
        let gib = |bytes: f64| format!("{:.2} GiB", bytes / f64::from(1u32 << 30));
        Err(Error::TooCostly {
            field: "model",
            needs: format!(
                "needs {} of memory for its weights in single precision and {} tokens",
                gib(needed),
                tokens.len()
            ),
            limit: format!("{} that can be had", gib(memory as f64)),
            advice: "take a smaller model or a shorter text, or make memory free",
        })
    }

    /// Reads a model; `progress` hears of every layer, with their number.
    ///
    /// # Errors
    /// [`Error::Unreadable`] when metadata or tensors are missing or do not fit each other, or when there are keys
    /// or tensors that these models do not have; what `progress` returns.
    pub fn read(file: &mut File, progress: &mut dyn FnMut(usize, usize) -> Result<(), Error>) -> Result<Self, Error> {
        let Plan { mut settings, layers, layout, scaling } = Plan::of(file)?;
        let mut optional = |name: &str| match layout.get(name) {
            Some((shape, needed)) if *needed || file.tensors.contains_key(name) => file.tensor(name, shape).map(Some),
            _ => Ok(None),
        };
        let factors = optional(FACTORS)?.map(|factors| factors.into_iter().map(f64::from).collect::<Vec<_>>());
        settings.rotary.factors = match factors {
            Some(factors) => Some(factors.into_iter().map(|factor| scaling * factor).collect()),
            None if scaling == 1.0 => None,
            None => Some(vec![scaling; settings.rotary.size.unwrap_or(settings.head_size) / 2]),
        };
        // What must be there has been found.
        let mut needed = |name: &str| optional(name).map(Option::unwrap_or_default);
        let embedding = needed(EMBEDDING)?;
        let final_norm = needed(FINAL_NORM)?;
        let mut read = Vec::with_capacity(layers);
        for number in 0..layers {
            progress(number, layers)?;
            let mut needed =
                |name: &str| optional(&format!("blk.{number}.{name}.weight")).map(Option::unwrap_or_default);
            let mut layer = Layer {
                attention_norm: needed("attn_norm")?,
                queries: needed("attn_q")?,
                keys: needed("attn_k")?,
                values: needed("attn_v")?,
                output: needed("attn_output")?,
                biases: Biases::default(),
                feed_forward_norm: needed("ffn_norm")?,
                gate: needed("ffn_gate")?,
                up: needed("ffn_up")?,
                down: needed("ffn_down")?,
            };
            let mut bias = |name: &str| optional(&format!("blk.{number}.{name}.bias"));
            layer.biases = Biases {
                queries: bias("attn_q")?,
                keys: bias("attn_k")?,
                values: bias("attn_v")?,
                output: bias("attn_output")?,
            };
            read.push(layer);
        }
        let logits = optional(LOGITS)?;
        let rotary = &settings.rotary;
        // Here rather than in the middle of a run.
        rotary.turns::<f32>(1, settings.head_size).map_err(|error| file.error(error))?;
        Ok(Self { settings, embedding, layers: read, final_norm, logits })
    }
}

impl File {
    pub(crate) fn required_count(&self, key: &str) -> Result<usize, Error> {
        let count = self.required(key, self.count(key))?;
        self.sound(key, count)
    }

    /// Products of sizes must not overflow.
    fn sound(&self, key: &str, count: usize) -> Result<usize, Error> {
        if (1..1 << 31).contains(&count) { Ok(count) } else { Err(self.error(format!("\"{key}\" is {count}"))) }
    }

    /// A number that is the same in all layers, written once or as a list of one for each layer.
    fn layer_count(&self, key: &str, layers: usize) -> Result<usize, Error> {
        let Some(list) = self.counts(key) else { return self.required_count(key) };
        if list.len() != layers {
            return Err(self.error(format!("has {} entries in \"{key}\", but {layers} layers", list.len())));
        }
        let first = self.required(key, list.first().and_then(|n| usize::try_from(*n).ok()))?;
        match list.iter().find(|n| **n != list[0]) {
            Some(other) => Err(self.error(format!(
                "has a \"{key}\" that differs between layers ({first} and {other}), which is not supported"
            ))),
            None => self.sound(key, first),
        }
    }

    /// The number of tokens, by the embedding.
    pub(crate) fn vocabulary(&self) -> Result<usize, Error> {
        match self.tensors.get(EMBEDDING).map(|tensor| &tensor.shape[..]) {
            Some(&[vocabulary, _]) if (1..1 << 31).contains(&vocabulary) => Ok(vocabulary),
            Some(_) => Err(self.error(format!("tensor \"{EMBEDDING}\" is not a matrix"))),
            None => Err(self.error(format!("has no tensor \"{EMBEDDING}\""))),
        }
    }
}

/// By which linear scaling divides positions; 1 for none.
fn scaling(file: &File) -> Result<f64, Error> {
    let kind = file.optional("llama.rope.scaling.type", |file, key| file.text(key))?;
    if !matches!(kind, None | Some("none" | "linear")) {
        let kind = quoted(kind.unwrap_or_default());
        return Err(file.error(format!("scales rotary embeddings by {kind}, which is not supported")));
    }
    // The second is the first's old name.
    let mut found = None;
    for key in ["llama.rope.scaling.factor", "llama.rope.scale_linear"] {
        match file.optional(key, File::number)? {
            None | Some(0.0 | 1.0) => {}
            Some(factor) if !(factor.is_finite() && factor > 0.0) => {
                return Err(file.error(format!("\"{key}\" is {factor:e}, which is not positive")));
            }
            Some(factor) if kind == Some("none") || found.is_some_and(|other| other != factor) => {
                return Err(file.error(format!("has a \"{key}\" of {factor} that contradicts its other scaling")));
            }
            Some(factor) => found = Some(factor),
        }
    }
    Ok(found.unwrap_or(1.0))
}

fn settings(file: &File, layers: usize) -> Result<Settings, Error> {
    let count = |key: &str| file.layer_count(&format!("llama.{key}"), layers);
    let (embedding, heads) = (file.required_count("llama.embedding_length")?, count("attention.head_count")?);
    let key_value_heads = match file.metadata.contains_key("llama.attention.head_count_kv") {
        true => count("attention.head_count_kv")?,
        false => heads,
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
    let rotary = Rotary {
        base: file.optional("llama.rope.freq_base", File::number)?.unwrap_or(10_000.0),
        size: Some(file.optional("llama.rope.dimension_count", File::count)?.unwrap_or(head_size)),
        pairing: Pairing::Interleaved,
        factors: None,
    };
    // Refused here rather than in the middle of a run.
    rotary.turns::<f32>(1, head_size).map_err(|error| file.error(error))?;
    let epsilon = "llama.attention.layer_norm_rms_epsilon";
    let vocabulary = file.vocabulary()?;
    if let Some(said) = file.optional("llama.vocab_size", File::count)?.filter(|said| *said != vocabulary) {
        return Err(file.error(format!("\"llama.vocab_size\" is {said}, but \"{EMBEDDING}\" has {vocabulary} tokens")));
    }
    Ok(Settings {
        embedding,
        heads,
        key_value_heads,
        head_size,
        feed_forward: count("feed_forward_length")?,
        vocabulary,
        context: file.required_count("llama.context_length")?,
        rotary,
        epsilon: file.required(epsilon, file.number(epsilon).filter(|e| e.is_finite() && *e >= 0.0))?,
    })
}
