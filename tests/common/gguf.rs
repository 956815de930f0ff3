//! GGUF files written by hand: metadata and tensors of a tiny llama, to be spoiled.

// Each test program uses a part of this.
#![allow(dead_code)]

use serde_json::{Value, json};

/// A tensor: name, dimensions from the innermost on, format, bytes.
pub type Tensor = (String, Vec<u64>, u32, Vec<u8>);

/// A file.
#[derive(Clone)]
pub struct Gguf {
    /// Keys, each with its type and value as bytes.
    pub metadata: Vec<(String, Vec<u8>)>,
    pub tensors: Vec<Tensor>,
    pub version: u32,
    /// Where tensors are put.
    pub alignment: usize,
}

/// Numbers that look like weights.
pub fn floats(count: u64, scale: f32) -> Vec<u8> {
    (0..count).flat_map(|k| (scale * ((k * 2_654_435_761 % 1000) as f32 / 500.0 - 1.0)).to_le_bytes()).collect()
}

fn text(out: &mut Vec<u8>, text: &[u8]) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text);
}

/// The type and value of a JSON value: whole numbers as `u32` or `i32`, others as `f32`.
pub fn typed(value: &Value) -> Vec<u8> {
    let (kind, bytes) = match value {
        Value::Bool(flag) => (7u32, vec![u8::from(*flag)]),
        Value::String(s) => {
            let mut out = Vec::new();
            text(&mut out, s.as_bytes());
            (8, out)
        }
        Value::Array(list) => {
            let entries: Vec<_> = list.iter().map(typed).collect();
            let kind = entries.first().map_or(8u32.to_le_bytes().to_vec(), |entry| entry[..4].to_vec());
            let mut out = kind;
            out.extend((list.len() as u64).to_le_bytes());
            entries.iter().for_each(|entry| out.extend(&entry[4..]));
            (9, out)
        }
        value if value.is_u64() => (4, (value.as_u64().unwrap() as u32).to_le_bytes().to_vec()),
        value if value.is_i64() => (5, (value.as_i64().unwrap() as i32).to_le_bytes().to_vec()),
        value => (6, (value.as_f64().unwrap() as f32).to_le_bytes().to_vec()),
    };
    [&kind.to_le_bytes()[..], &bytes].concat()
}

/// The character that stands for a byte in byte-level tokens: printable ones for themselves, the others in order
/// from U+0100 on.
pub fn letter(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|b| !printable(*b)).count() as u32;
    char::from_u32(256 + before).unwrap()
}

impl Gguf {
    /// 2 layers, width 8, 2 heads on 1 key-value head, 12 tokens, context 16.
    pub fn tiny() -> Self {
        Self::of(2, 12, 16)
    }

    /// A llama of width 8 with 2 heads on 1 key-value head.
    pub fn of(layers: usize, tokens: u64, context: u64) -> Self {
        let metadata = [
            ("general.architecture", json!("llama")),
            ("general.name", json!("tiny")),
            ("llama.block_count", json!(layers)),
            ("llama.context_length", json!(context)),
            ("llama.embedding_length", json!(8)),
            ("llama.feed_forward_length", json!(12)),
            ("llama.attention.head_count", json!(2)),
            ("llama.attention.head_count_kv", json!(1)),
            ("llama.attention.layer_norm_rms_epsilon", json!(1e-5)),
        ];
        let mut file = Self {
            metadata: metadata.into_iter().map(|(k, v)| (k.to_string(), typed(&v))).collect(),
            tensors: Vec::new(),
            version: 3,
            alignment: 32,
        };
        file.add("token_embd.weight", &[8, tokens], 1.0);
        file.add("output_norm.weight", &[8], 1.0);
        for layer in 0..layers {
            let parts: [(&str, &[u64]); 9] = [
                ("attn_norm", &[8]),
                ("attn_q", &[8, 8]),
                ("attn_k", &[8, 4]),
                ("attn_v", &[8, 4]),
                ("attn_output", &[8, 8]),
                ("ffn_norm", &[8]),
                ("ffn_gate", &[8, 12]),
                ("ffn_up", &[8, 12]),
                ("ffn_down", &[12, 8]),
            ];
            for (name, dimensions) in parts {
                file.add(&format!("blk.{layer}.{name}.weight"), dimensions, 0.7);
            }
        }
        file
    }

    /// One layer and a byte-level tokenizer: the 256 bytes, then "he", "ll", "hell", "hello", then `more`, tokens
    /// with their kinds.
    pub fn speaking(pre: &str, more: &[(&str, i64)]) -> Self {
        let mut tokens: Vec<String> = (0..=255).map(|byte| letter(byte).to_string()).collect();
        tokens.extend(["he", "ll", "hell", "hello"].map(String::from));
        tokens.extend(more.iter().map(|(token, _)| (*token).to_string()));
        let kinds: Vec<i64> = std::iter::repeat_n(1, 260).chain(more.iter().map(|(_, kind)| *kind)).collect();
        // Types of tokens are signed in the specification.
        let list = [&9u32.to_le_bytes()[..], &5u32.to_le_bytes(), &(kinds.len() as u64).to_le_bytes()].concat();
        let kinds = kinds.iter().flat_map(|kind| (*kind as i32).to_le_bytes());
        Self::of(1, tokens.len() as u64, 64)
            .set("tokenizer.ggml.model", json!("gpt2"))
            .set("tokenizer.ggml.pre", json!(pre))
            .set("tokenizer.ggml.tokens", json!(tokens))
            .set("tokenizer.ggml.merges", json!(["h e", "l l", "he ll", "hell o"]))
            .raw("tokenizer.ggml.token_type", [list, kinds.collect()].concat())
    }

    pub fn add(&mut self, name: &str, dimensions: &[u64], scale: f32) {
        self.tensors.push((name.into(), dimensions.to_vec(), 0, floats(dimensions.iter().product(), scale)));
    }

    /// Replaces a key.
    pub fn set(self, key: &str, value: Value) -> Self {
        self.raw(key, typed(&value))
    }

    /// Replaces a key by a type and a value in bytes.
    pub fn raw(mut self, key: &str, typed: Vec<u8>) -> Self {
        self.metadata.retain(|(k, _)| k != key);
        self.and(key, typed)
    }

    /// Adds a key, also one that is there.
    pub fn and(mut self, key: &str, typed: Vec<u8>) -> Self {
        self.metadata.push((key.into(), typed));
        self
    }

    /// Without a tensor or key.
    pub fn without(mut self, name: &str) -> Self {
        self.tensors.retain(|(n, ..)| n != name);
        self.metadata.retain(|(k, _)| k != name);
        self
    }

    /// Replaces a tensor.
    pub fn with(mut self, name: &str, dimensions: &[u64], format: u32, bytes: Vec<u8>) -> Self {
        self = self.without(name);
        self.tensors.push((name.into(), dimensions.to_vec(), format, bytes));
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.laid_out(|_, offset| offset)
    }

    /// The file with the offset of each tensor, by its number, changed by `place`; the data stay where they were.
    pub fn laid_out(&self, place: impl Fn(usize, u64) -> u64) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            text(&mut out, key.as_bytes());
            out.extend(value);
        }
        let mut offset = 0u64;
        for (number, (name, dimensions, format, bytes)) in self.tensors.iter().enumerate() {
            text(&mut out, name.as_bytes());
            out.extend((dimensions.len() as u32).to_le_bytes());
            dimensions.iter().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(format.to_le_bytes());
            out.extend(place(number, offset).to_le_bytes());
            offset += (bytes.len() as u64).next_multiple_of(self.alignment as u64);
        }
        for (.., bytes) in &self.tensors {
            out.resize(out.len().next_multiple_of(self.alignment), 0);
            out.extend(bytes);
        }
        out
    }
}
