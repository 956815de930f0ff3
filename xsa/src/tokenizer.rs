//! The tokenizer that a GGUF file carries: byte-level byte-pair encoding, by the crate `tokenizers`.
//!
//! As in llama.cpp: tokens of the kinds "unknown", "control" and "user-defined" are found in the text as they are
//! written, the longest first, and what lies between is split by the pre-tokenizer and merged. Where a file does
//! not say whether texts begin with a token of their own, its pre-tokenizer decides.

use std::collections::BTreeMap;

use tokenizers::SplitDelimiterBehavior;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};

use crate::error::Error;
use crate::gguf::{File, Neutral, quoted};

/// How llama 3 splits a text (the regular expression of its `tokenizer.json`).
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The kinds of tokens in `tokenizer.ggml.token_type` that are found in a text as they are written: unknown,
/// control and user-defined ones.
const WRITTEN: [i64; 3] = [2, 3, 4];

/// What to do about a tokenizer that cannot be used.
const HINT: &str = "give token ids instead of a text";

/// Keys that are read below, and those that play no part in turning a text into tokens: the meaning of tokens, what
/// ends an answer, templates of dialogues.
const KNOWN: [&str; 33] = [
    "ggml.model",
    "ggml.pre",
    "ggml.tokens",
    "ggml.merges",
    "ggml.token_type",
    "ggml.add_bos_token",
    "ggml.add_eos_token",
    "ggml.bos_token_id",
    "ggml.eos_token_id",
    "ggml.eos_token_ids",
    "ggml.eot_token_id",
    "ggml.eom_token_id",
    "ggml.unknown_token_id",
    "ggml.seperator_token_id",
    "ggml.padding_token_id",
    "ggml.cls_token_id",
    "ggml.mask_token_id",
    "ggml.prefix_token_id",
    "ggml.suffix_token_id",
    "ggml.middle_token_id",
    "ggml.fim_pre_token_id",
    "ggml.fim_suf_token_id",
    "ggml.fim_mid_token_id",
    "ggml.fim_pad_token_id",
    "ggml.fim_rep_token_id",
    "ggml.fim_sep_token_id",
    // Byte-pair encoding ranks merges; scores are of other kinds.
    "ggml.scores",
    "ggml.token_type_count",
    "ggml.suppress_tokens",
    "chat_template",
    "chat_template.",
    "chat_templates",
    // The same tokenizer in another form.
    "huggingface.json",
];

/// Keys of what these tokenizers do not do, with the value by which a file says so.
const NEUTRAL: [(&str, Neutral); 3] = [
    ("ggml.add_sep_token", Neutral::Flag(false)),
    ("ggml.add_space_prefix", Neutral::Flag(false)),
    ("ggml.remove_extra_whitespaces", Neutral::Flag(false)),
];

/// Turns texts into tokens.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// How texts are split before merging.
    kind: String,
    /// Bytes of text that each token stands for where it was merged; none for ids without a token.
    bytes: Vec<usize>,
    /// Tokens that are found as they are written, in the order in which they are looked for.
    written: Vec<(String, u32)>,
    /// The token that begins every text, if the model wants one.
    begin: Option<u32>,
    /// The token that ends every text, likewise.
    end: Option<u32>,
    /// No text with more bytes has as few tokens as the model can take.
    most_bytes: usize,
}

impl Tokenizer {
    /// The tokenizer in `file`.
    ///
    /// # Errors
    /// [`Error::Unreadable`] when the file holds none, one of a kind that is not supported, or one that contradicts
    /// itself.
    pub fn read(file: &File) -> Result<Self, Error> {
        let model = file
            .optional("tokenizer.ggml.model", |file, key| file.text(key))?
            .ok_or_else(|| file.error(format!("has no tokenizer; {HINT}")))?;
        if model != "gpt2" {
            let model = quoted(model);
            return Err(file.error(format!("has a tokenizer of the kind {model}; only \"gpt2\" is supported; {HINT}")));
        }
        file.check_keys("tokenizer.", &KNOWN, &NEUTRAL)?;
        let kind = file.optional("tokenizer.ggml.pre", |file, key| file.text(key))?.ok_or_else(|| {
            file.error(format!("does not say how its tokenizer splits texts (\"tokenizer.ggml.pre\"); {HINT}"))
        })?;
        let (splits, ignore_merges) = splits(kind).ok_or_else(|| {
            file.error(format!(
                "has a tokenizer that splits texts as {}; {} are supported; {HINT}",
                quoted(kind),
                [GPT2, SMOLLM, LLAMA_3].concat().join(", ")
            ))
        })?;
        let missing = |key: &str| file.error(format!("has no usable \"{key}\"; {HINT}"));
        let tokens = file.texts("tokenizer.ggml.tokens").ok_or_else(|| missing("tokenizer.ggml.tokens"))?;
        let rows = file.vocabulary()?;
        if tokens.len() > rows {
            return Err(file.error(format!("has {} tokens, but its embedding {rows}", tokens.len())));
        }
        let mut ids = BTreeMap::new();
        for (id, token) in tokens.iter().enumerate().filter(|(_, token)| !token.is_empty()) {
            if let Some(other) = ids.insert(*token, id) {
                return Err(file.error(format!("has the token {} twice, as {other} and {id}", quoted(token))));
            }
        }
        let kinds = file.optional("tokenizer.ggml.token_type", File::counts)?.unwrap_or_default();
        if !kinds.is_empty() && kinds.len() != tokens.len() {
            return Err(file.error(format!("has {} tokens, but the kinds of {}", tokens.len(), kinds.len())));
        }
        let merges = merges(file, &ids)?;
        let vocabulary: Vocab = ids.iter().map(|(token, id)| ((*token).to_string(), *id as u32)).collect();
        let model = BPE::builder()
            .vocab_and_merges(vocabulary, merges)
            .ignore_merges(ignore_merges)
            .build()
            .map_err(|error| file.error(format!("has an unusable tokenizer: {error}")))?;
        let mut inner = tokenizers::Tokenizer::new(model);
        inner.with_pre_tokenizer(Some(splits));
        let mut written: Vec<(String, u32)> = tokens
            .iter()
            .zip(0..)
            .zip(&kinds)
            .filter(|((token, _), kind)| WRITTEN.contains(kind) && !token.is_empty())
            .map(|((token, id), _)| ((*token).to_string(), id))
            .collect();
        written.sort_by_key(|(token, id)| (std::cmp::Reverse(token.len()), *id));
        // Without a word of the file, as llama.cpp.
        let begins = file.optional("tokenizer.ggml.add_bos_token", File::flag)?.unwrap_or(LLAMA_3.contains(&kind));
        let ends = file.optional("tokenizer.ggml.add_eos_token", File::flag)?.unwrap_or(false);
        let begin = begins.then(|| special(file, "tokenizer.ggml.bos_token_id", tokens.len())).transpose()?;
        let end = ends.then(|| special(file, "tokenizer.ggml.eos_token_id", tokens.len())).transpose()?;
        let longest = tokens.iter().map(|token| token.len()).max().unwrap_or(0);
        Ok(Self {
            inner,
            kind: kind.into(),
            // A character of a merged token is a byte.
            bytes: tokens.iter().map(|token| token.chars().count()).collect(),
            written,
            begin,
            end,
            most_bytes: file.required_count("llama.context_length")?.saturating_mul(longest),
        })
    }

    /// How texts are split before merging: the name of the pre-tokenizer.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// The token that begins every text, if there is one.
    pub fn begin(&self) -> Option<u32> {
        self.begin
    }

    /// The token that ends every text, if there is one.
    pub fn end(&self) -> Option<u32> {
        self.end
    }

    /// The tokens of a text, between the model's begin and end tokens where it wants them.
    ///
    /// # Errors
    /// [`Error::Unreadable`] when the text is longer than the model can take, the tokenizer fails, or has no token
    /// for a part of the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        let failed = |problem: String| Error::unreadable("tokenizer", problem);
        // Found out before the text is taken to pieces.
        if text.len() > self.most_bytes {
            return Err(failed(format!(
                "{} bytes of text are more than the model's context can hold: give a shorter text",
                text.len()
            )));
        }
        let mut ids: Vec<u32> = self.begin.into_iter().collect();
        let mut lost = 0;
        for piece in self.pieces(text) {
            match piece {
                Piece::Token(id) => ids.push(id),
                Piece::Text(text) => {
                    let encoded = self.inner.encode_fast(text, false).map_err(|error| failed(error.to_string()))?;
                    // The crate drops what has no token.
                    let kept: usize = encoded.get_ids().iter().filter_map(|id| self.bytes.get(*id as usize)).sum();
                    lost += text.len().abs_diff(kept);
                    ids.extend(encoded.get_ids());
                }
            }
        }
        if lost > 0 {
            return Err(failed(format!("has no tokens for {lost} of {} bytes of the text", text.len())));
        }
        ids.extend(self.end);
        Ok(ids)
    }

    /// The text in pieces: each written token takes its places in what the longer ones left.
    fn pieces<'a>(&self, text: &'a str) -> Vec<Piece<'a>> {
        let mut pieces = vec![Piece::Text(text)];
        for (token, id) in self.written.iter().filter(|(token, _)| text.contains(token.as_str())) {
            let mut finer = Vec::with_capacity(pieces.len());
            for piece in pieces {
                let Piece::Text(text) = piece else {
                    finer.push(piece);
                    continue;
                };
                for (number, between) in text.split(token.as_str()).enumerate() {
                    if number > 0 {
                        finer.push(Piece::Token(*id));
                    }
                    if !between.is_empty() {
                        finer.push(Piece::Text(between));
                    }
                }
            }
            pieces = finer;
        }
        pieces
    }
}

/// A part of a text.
enum Piece<'a> {
    /// Still to be split and merged.
    Text(&'a str),
    /// A token that is written in the text.
    Token(u32),
}

/// The token at `key`, which the tokenizer adds to every text.
fn special(file: &File, key: &str, tokens: usize) -> Result<u32, Error> {
    let id = file.optional(key, File::count)?.ok_or_else(|| {
        file.error(format!("has a tokenizer that adds a token to every text, but no \"{key}\" that says which; {HINT}"))
    })?;
    match u32::try_from(id) {
        Ok(narrow) if id < tokens => Ok(narrow),
        _ => Err(file.error(format!(
            "\"{key}\" is {id}, but there are {tokens} tokens, 0 to {}; {HINT}",
            tokens.saturating_sub(1)
        ))),
    }
}

/// The merges in order of their rank.
fn merges(file: &File, ids: &BTreeMap<&str, usize>) -> Result<Vec<(String, String)>, Error> {
    const KEY: &str = "tokenizer.ggml.merges";
    let missing = || file.error(format!("has no usable \"{KEY}\"; {HINT}"));
    let list = file.texts(KEY).ok_or_else(missing)?;
    let mut merges = Vec::with_capacity(list.len());
    let mut seen = std::collections::BTreeSet::new();
    for merge in list {
        let (a, b) = merge.split_once(' ').ok_or_else(missing)?;
        // The crate panics where the result of a merge is longer than any token.
        if !ids.contains_key(format!("{a}{b}").as_str()) {
            let (a, b) = (quoted(a), quoted(b));
            return Err(file.error(format!("has a tokenizer that merges {a} and {b} to no token; {HINT}")));
        }
        if !seen.insert((a, b)) {
            return Err(file.error(format!("has a tokenizer that merges {} and {} twice", quoted(a), quoted(b))));
        }
        merges.push((a.to_string(), b.to_string()));
    }
    Ok(merges)
}

const GPT2: &[&str] = &["gpt-2", "gpt2"];
const SMOLLM: &[&str] = &["smollm", "starcoder", "refact"];
/// Those that begin texts with a token unless told otherwise.
const LLAMA_3: &[&str] = &["llama-bpe", "llama3", "llama-v3"];

/// How texts are split before merging, and whether words of the vocabulary are taken whole.
fn splits(kind: &str) -> Option<(PreTokenizerWrapper, bool)> {
    if GPT2.contains(&kind) {
        return Some((ByteLevel::new(false, true, true).into(), false));
    }
    if SMOLLM.contains(&kind) {
        // Digits one by one.
        let steps = vec![Digits::new(true).into(), ByteLevel::new(false, true, true).into()];
        return Some((Sequence::new(steps).into(), false));
    }
    if LLAMA_3.contains(&kind) {
        let split = Split::new(SplitPattern::Regex(LLAMA3.into()), SplitDelimiterBehavior::Isolated, false).ok()?;
        let steps = vec![split.into(), ByteLevel::new(false, true, false).into()];
        return Some((Sequence::new(steps).into(), true));
    }
    None
}
