//! The tokenizer that a GGUF file carries: byte-level byte-pair encoding, by the crate `tokenizers`.

use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior};

use crate::error::Error;
use crate::gguf::File;

/// How llama 3 splits a text (the regular expression of its `tokenizer.json`).
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The kind of a token in `tokenizer.ggml.token_type` that stands for no text of its own.
const CONTROL: i64 = 3;

/// Turns texts into tokens.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Bytes of text that each token stands for.
    bytes: Vec<usize>,
    /// The token that begins every text, if the model wants one.
    begin: Option<u32>,
}

impl Tokenizer {
    /// The tokenizer in `file`.
    ///
    /// # Errors
    /// [`Error::Unreadable`] when the file holds none, or one of a kind that is not supported.
    pub fn read(file: &File) -> Result<Self, Error> {
        let hint = "give token ids instead of a text";
        let model = file.text("tokenizer.ggml.model").ok_or_else(|| file.error(format!("has no tokenizer; {hint}")))?;
        if model != "gpt2" {
            return Err(
                file.error(format!("has a tokenizer of the kind \"{model}\"; only \"gpt2\" is supported; {hint}"))
            );
        }
        let kind = file.text("tokenizer.ggml.pre").unwrap_or("gpt-2");
        let (splits, ignore_merges) = splits(kind).ok_or_else(|| {
            file.error(format!(
                "has a tokenizer that splits texts as \"{kind}\"; {} are supported; {hint}",
                [GPT2, SMOLLM, LLAMA_3].concat().join(", ")
            ))
        })?;
        let missing = |key: &str| file.error(format!("has no usable \"{key}\"; {hint}"));
        let tokens = file.texts("tokenizer.ggml.tokens").ok_or_else(|| missing("tokenizer.ggml.tokens"))?;
        let merges = file.texts("tokenizer.ggml.merges").ok_or_else(|| missing("tokenizer.ggml.merges"))?;
        let merges: Option<Vec<(String, String)>> =
            merges.iter().map(|merge| merge.split_once(' ').map(|(a, b)| (a.into(), b.into()))).collect();
        let merges = merges.ok_or_else(|| missing("tokenizer.ggml.merges"))?;
        let vocabulary: Vocab =
            tokens.iter().enumerate().map(|(id, token)| ((*token).to_string(), id as u32)).collect();
        // The crate panics where the result of a merge is longer than any token.
        if let Some((a, b)) = merges.iter().find(|(a, b)| !vocabulary.contains_key(&format!("{a}{b}"))) {
            return Err(file.error(format!("has a tokenizer that merges \"{a}\" and \"{b}\" to no token; {hint}")));
        }
        let model = BPE::builder()
            .vocab_and_merges(vocabulary, merges)
            .ignore_merges(ignore_merges)
            .build()
            .map_err(|error| file.error(format!("has an unusable tokenizer: {error}")))?;
        let mut inner = tokenizers::Tokenizer::new(model);
        inner.with_pre_tokenizer(Some(splits));
        let kinds = file.counts("tokenizer.ggml.token_type").unwrap_or_default();
        // A character of a token is a byte, but control tokens are written as they are.
        let bytes = |(id, token): (usize, &&str)| {
            if kinds.get(id) == Some(&CONTROL) { token.len() } else { token.chars().count() }
        };
        let bytes = tokens.iter().enumerate().map(bytes).collect();
        let control = tokens.iter().zip(&kinds).filter(|(_, kind)| **kind == CONTROL);
        let control: Vec<AddedToken> = control.map(|(token, _)| AddedToken::from((*token).to_string(), true)).collect();
        inner.add_special_tokens(control).map_err(|error| file.error(format!("has an unusable tokenizer: {error}")))?;
        let wanted = file.flag("tokenizer.ggml.add_bos_token").unwrap_or(false);
        let begin = file.count("tokenizer.ggml.bos_token_id").and_then(|id| u32::try_from(id).ok());
        Ok(Self { inner, bytes, begin: begin.filter(|_| wanted) })
    }

    /// The tokens of a text, after the model's begin token if it wants one.
    ///
    /// # Errors
    /// [`Error::Unreadable`] when the tokenizer fails, or has no token for a part of the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        let encoded = self.inner.encode_fast(text, false).map_err(|error| Error::unreadable("tokenizer", error))?;
        // The crate drops what has no token.
        let written: usize = encoded.get_ids().iter().filter_map(|id| self.bytes.get(*id as usize)).sum();
        if written != text.len() {
            let lost = text.len().abs_diff(written);
            return Err(Error::unreadable(
                "tokenizer",
                format!("has no tokens for {lost} of {} bytes of the text", text.len()),
            ));
        }
        Ok(self.begin.into_iter().chain(encoded.get_ids().iter().copied()).collect())
    }
}

const GPT2: &[&str] = &["gpt-2", "gpt2"];
const SMOLLM: &[&str] = &["smollm", "starcoder", "refact"];
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
