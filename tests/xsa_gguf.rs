//! Model files of the wild: what is read, what is refused and by which name. Needs no model but tiny ones made here.

mod common;
#[path = "common/gguf.rs"]
mod gguf;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};

use common::{headflow, ok, printed, refused};
use gguf::{Gguf, floats, typed};
use headflow::xsa::gguf::File;
use headflow::xsa::tokenizer::Tokenizer;
use headflow::xsa::{Error, Llama};
use serde_json::{Value, json};

/// The system's allocator, which remembers the largest piece that each thread asked for.
struct Watched;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system's allocator as it is.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.with(|largest| largest.set(largest.get().max(layout.size())));
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise; it was made by the system's allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watched = Watched;

/// A folder with one model file that changes.
struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("model.gguf")
    }

    fn open(&self, bytes: &[u8]) -> Result<File, Error> {
        fs::write(self.path(), bytes).unwrap();
        File::open(&self.path())
    }

    fn model(&self, file: &Gguf) -> Result<Llama, Error> {
        let mut file = self.open(&file.bytes())?;
        Llama::check(&file, &[1, 2], u64::MAX)?;
        Llama::read(&mut file, &mut |_, _| Ok(()))
    }

    fn tokenizer(&self, file: &Gguf) -> Result<Tokenizer, Error> {
        Tokenizer::read(&self.open(&file.bytes())?)
    }

    /// That a file is refused in one line, which says `expected`.
    fn refuses<T>(&self, outcome: Result<T, Error>, expected: &str) {
        let Err(error) = outcome else { panic!("accepted, but {expected:?} was expected") };
        let line = error.to_string();
        assert!(line.contains(expected) && line.contains("model.gguf") && !line.contains('\n'), "{line}: {expected}");
    }
}

/// A value of a type, by its number.
fn value(kind: u32, bytes: &[u8]) -> Vec<u8> {
    [&kind.to_le_bytes()[..], bytes].concat()
}

#[test]
fn names_that_stand_twice_are_refused() {
    let place = Place::new();
    let twice = |key: &str, second: Vec<u8>| {
        let file = Gguf::speaking("smollm", &[]).and(key, second);
        place.refuses(place.model(&file), &format!("has \"{key}\" twice in its metadata"));
    };
    twice("llama.context_length", typed(&json!(64)));
    twice("general.name", typed(&json!("other")));
    twice("tokenizer.ggml.pre", typed(&json!("gpt-2")));
    let aligned = Gguf::tiny().set("general.alignment", json!(32)).and("general.alignment", typed(&json!(0)));
    place.refuses(place.model(&aligned), "has \"general.alignment\" twice in its metadata");
    let mut file = Gguf::tiny();
    file.add("blk.0.attn_k.weight", &[8, 4], 0.1);
    place.refuses(place.model(&file), "has the tensor \"blk.0.attn_k.weight\" twice");
    let vocabulary = Gguf::speaking("smollm", &[("hell", 1)]);
    place.refuses(place.tokenizer(&vocabulary), "has the token \"hell\" twice, as 258 and 260");
    let merges = Gguf::speaking("smollm", &[]).set("tokenizer.ggml.merges", json!(["h e", "l l", "h e"]));
    place.refuses(place.tokenizer(&merges), "merges \"h\" and \"e\" twice");
}

/// Alignments of every type for whole numbers give the same model; others are refused.
#[test]
fn alignments_of_every_type() {
    let place = Place::new();
    let plain = place.model(&Gguf::tiny()).unwrap();
    let kinds: [(u32, usize); 8] = [(0, 1), (1, 1), (2, 2), (3, 2), (4, 4), (5, 4), (10, 8), (11, 8)];
    for (kind, size) in kinds {
        let of = |number: i64| value(kind, &number.to_le_bytes()[..size]);
        for alignment in [1, 8, 32, 64] {
            let file = Gguf { alignment, ..Gguf::tiny().raw("general.alignment", of(alignment as i64)) };
            assert_eq!(place.model(&file).unwrap(), plain, "{kind} {alignment}");
        }
        for bad in [0, 24] {
            let file = Gguf::tiny().raw("general.alignment", of(bad));
            place.refuses(place.model(&file), &format!("\"general.alignment\" of {bad} in its metadata"));
        }
    }
    for (kind, bytes) in [
        (6, 32f32.to_le_bytes().to_vec()),
        (12, 32f64.to_le_bytes().to_vec()),
        (7, vec![1]),
        (1, vec![0xe0]),
        (11, (-32i64).to_le_bytes().to_vec()),
        (8, [&2u64.to_le_bytes()[..], b"32"].concat()),
        (9, [&4u32.to_le_bytes()[..], &1u64.to_le_bytes(), &32u32.to_le_bytes()].concat()),
    ] {
        let file = Gguf::tiny().raw("general.alignment", value(kind, &bytes));
        place.refuses(place.model(&file), "no usable \"general.alignment\"");
    }
    for huge in [1u64 << 63, 1 << 40] {
        let file = Gguf::tiny().raw("general.alignment", value(10, &huge.to_le_bytes()));
        place.refuses(place.model(&file), "");
    }
    // A word of the vocabulary is not a key.
    let spelled = Gguf::speaking("smollm", &[("general.alignment", 1), ("\u{11}\0\0\0\0\0\0\0general.alignment", 4)]);
    assert!(place.model(&spelled).is_ok() && place.tokenizer(&spelled).is_ok());
}

#[test]
fn other_files_are_named_as_what_they_are() {
    let place = Place::new();
    let bytes = Gguf::tiny().bytes();
    let of_version = |version: u32| [&bytes[..4], &version.to_le_bytes(), &bytes[8..]].concat();
    assert!(place.open(&of_version(2)).is_ok());
    place.refuses(place.open(&of_version(1)), "is GGUF of version 1, which is too old");
    place.refuses(place.open(&of_version(4)), "GGUF of version 4");
    place.refuses(place.open(&of_version(0)), "GGUF of version 0");
    for version in [2u32, 3] {
        place.refuses(place.open(&of_version(version.swap_bytes())), "is big-endian");
    }
    for kind in [2u32, 4] {
        let count = |n: u32| value(kind, &n.to_le_bytes()[..if kind == 2 { 2 } else { 4 }]);
        let part = Gguf::tiny().without("output_norm.weight").raw("split.no", count(0)).raw("split.count", count(2));
        place.refuses(place.model(&part), "is part 1 of 2: merge the parts first");
        // The later parts have hardly any metadata.
        let mut last = Gguf::tiny().raw("split.no", count(2)).raw("split.count", count(3));
        last.metadata.retain(|(key, _)| key.starts_with("split"));
        place.refuses(place.model(&last), "is part 3 of 3");
        assert!(place.model(&Gguf::tiny().raw("split.count", count(1))).is_ok());
    }
    let typed = |kind: &str| Gguf::tiny().set("general.type", json!(kind));
    place.refuses(place.model(&typed("adapter")), "is of the type \"adapter\", not a model");
    assert!(place.model(&typed("model")).is_ok());
    place.refuses(
        place.model(&Gguf::tiny().set("general.architecture", json!(1))),
        "no usable \"general.architecture\"",
    );
    // Quantised formats had another layout before version 2.
    let version = |v: u32| Gguf::tiny().set("general.quantization_version", json!(v));
    assert!(place.model(&version(1)).is_ok());
    let quantised = |v| version(v).with("x", &[32, 2], 8, vec![0; 68]);
    place.refuses(place.open(&quantised(1).bytes()), "\"general.quantization_version\" of 1; only 2 can be read");
    assert!(place.open(&quantised(2).bytes()).is_ok());
    place.refuses(File::open(place.folder.path()).map_err(|e| Error::unreadable("model.gguf", e)), "is not a file");
}

/// Unknown formats by name, with the tensor that has them; formats to come by number.
#[test]
fn unknown_formats_name_the_tensor() {
    let place = Place::new();
    for (format, name) in [
        (40, "NVFP4"),
        (41, "Q1_0"),
        (38, "IQ4_NL_8_8"),
        (24, "I8"),
        (42, "number 42"),
        (u32::MAX, "number 4294967295"),
    ] {
        let file = Gguf::tiny().with("blk.0.attn_k.weight", &[8, 4], format, vec![0; 128]);
        let expected = format!("tensor \"blk.0.attn_k.weight\" has the format {name}, which is not supported (F32,");
        place.refuses(place.model(&file), &expected);
    }
}

/// A key that nothing here knows could change what the model computes.
#[test]
fn unknown_keys_are_refused_by_name() {
    let place = Place::new();
    let plain = place.model(&Gguf::tiny()).unwrap();
    // What changes the function, whatever it is called.
    for (key, value) in [
        ("llama.attention.causal", json!(false)),
        ("llama.attention.causal", json!(0)),
        ("llama.attention.sliding_window", json!(4096)),
        ("llama.attention.scale", json!(0.5)),
        ("llama.attention.clamp_kqv", json!(8.0)),
        ("llama.attn_logit_softcapping", json!(50.0)),
        ("llama.final_logit_softcapping", json!(30.0)),
        ("llama.logit_scale", json!(0.0625)),
        ("llama.expert_count", json!(8)),
        ("llama.rope.scaling.attn_factor", json!(1.5)),
        ("llama.rope.scaling.yarn_log_multiplier", json!(0.1)),
        ("llama.use_parallel_residual", json!(true)),
        ("llama.tensor_data_layout", json!("reference")),
        ("llama.interleave_moe_layer_step", json!(2)),
        ("llama.key_of_years_to_come", json!([1, 2])),
        ("llama.", json!(1)),
    ] {
        let file = Gguf::tiny().set(key, value.clone());
        place.refuses(place.model(&file), &format!("has a \"{key}\""));
        place.refuses(place.model(&file), "which is not supported");
    }
    // The same keys where they say that there is nothing of the kind, and what tells of the model's making.
    for (key, value) in [
        ("llama.attention.causal", json!(true)),
        ("llama.attention.sliding_window", json!(0)),
        ("llama.attention.clamp_kqv", json!(0.0)),
        ("llama.expert_count", json!(0)),
        ("llama.expert_used_count", json!(0)),
        ("llama.logit_scale", json!(1.0)),
        ("llama.use_parallel_residual", json!(false)),
        ("llama.tensor_data_layout", json!("Meta AI original pth")),
        ("llama.rope.scaling.attn_factor", json!(1.0)),
        ("llama.rope.scaling.original_context_length", json!(8)),
        ("llama.vocab_size", json!(12)),
        ("general.file_type", json!(0)),
        ("general.key_of_years_to_come", json!(1)),
        ("quantize.imatrix.entries_count", json!(3)),
        ("qwen2.attention.causal", json!(false)),
    ] {
        assert_eq!(place.model(&Gguf::tiny().set(key, value.clone())).unwrap(), plain, "{key}");
    }
    place.refuses(place.model(&Gguf::tiny().set("llama.vocab_size", json!(13))), "\"llama.vocab_size\" is 13");

    let speaking = || Gguf::speaking("smollm", &[("<s>", 3)]);
    for (key, value) in [
        ("tokenizer.ggml.add_space_prefix", json!(true)),
        ("tokenizer.ggml.remove_extra_whitespaces", json!(true)),
        ("tokenizer.ggml.add_sep_token", json!(true)),
        ("tokenizer.ggml.precompiled_charsmap", json!([1])),
        ("tokenizer.ggml.normalizer.lowercase", json!(true)),
        ("tokenizer.ggml.added_tokens", json!(["x"])),
        ("tokenizer.key_of_years_to_come", json!("x")),
    ] {
        let file = speaking().set(key, value.clone());
        place.refuses(place.tokenizer(&file), &format!("has a \"{key}\""));
        // Where token ids are given, nobody asks the tokenizer.
        assert!(place.model(&file).is_ok(), "{key}");
    }
    for (key, value) in [
        ("tokenizer.ggml.add_space_prefix", json!(false)),
        ("tokenizer.ggml.unknown_token_id", json!(0)),
        ("tokenizer.chat_template", json!("{{ messages }}")),
        ("tokenizer.chat_template.tool_use", json!("{{ tools }}")),
        ("tokenizer.chat_templates", json!(["tool_use"])),
        ("tokenizer.ggml.bos_token_id", json!(9999)),
    ] {
        let tokenizer = place.tokenizer(&speaking().set(key, value.clone())).unwrap();
        assert_eq!(tokenizer.encode("hello").unwrap(), [259], "{key}");
    }
}

#[test]
fn numbers_of_layers_may_be_lists() {
    let place = Place::new();
    let plain = place.model(&Gguf::tiny()).unwrap();
    let keys =
        [("llama.attention.head_count_kv", 1), ("llama.attention.head_count", 2), ("llama.feed_forward_length", 12)];
    for (key, number) in keys {
        let with = |list: Value| Gguf::tiny().set(key, list);
        assert_eq!(place.model(&with(json!([number, number]))).unwrap(), plain);
        let differs = format!("\"{key}\" that differs between layers ({number} and 4)");
        place.refuses(place.model(&with(json!([number, 4]))), &differs);
        place.refuses(place.model(&with(json!([number]))), &format!("has 1 entries in \"{key}\", but 2 layers"));
        for unusable in [json!([-number, -number]), json!([1.0, 1.0]), json!(["1", "1"]), json!([[1], [1]])] {
            place.refuses(place.model(&with(unusable)), &format!("no usable \"{key}\""));
        }
    }
}

/// A linear scaling of 1 is none; by `f`, the frequencies are divided by it, as by factors of the file's own.
#[test]
fn linear_scaling_divides_positions() {
    let place = Place::new();
    let plain = place.model(&Gguf::tiny()).unwrap();
    let scaled = |kind: Option<&str>, key: &str, factor: f64| {
        let file = Gguf::tiny().set(key, json!(factor));
        place.model(&if let Some(kind) = kind { file.set("llama.rope.scaling.type", json!(kind)) } else { file })
    };
    let factor = "llama.rope.scaling.factor";
    for kind in [None, Some("linear"), Some("none")] {
        for one in [1.0, 0.0] {
            assert_eq!(scaled(kind, factor, one).unwrap(), plain);
        }
    }
    assert_eq!(place.model(&Gguf::tiny().set("llama.rope.scaling.type", json!("linear"))).unwrap(), plain);
    let mut own = Gguf::tiny();
    own.tensors.push(("rope_freqs.weight".into(), vec![2], 0, 4f32.to_le_bytes().repeat(2)));
    let own_factors = place.model(&own).unwrap();
    assert_eq!(own_factors.settings.rotary.factors, Some(vec![4.0; 2]));
    for (kind, key) in [(None, factor), (Some("linear"), factor), (None, "llama.rope.scale_linear")] {
        assert_eq!(scaled(kind, key, 4.0).unwrap(), own_factors);
    }
    // Both together.
    let both = place.model(&own.clone().set(factor, json!(2.5))).unwrap();
    assert_eq!(both.settings.rotary.factors, Some(vec![10.0; 2]));
    let likelihood = |model: &Llama| model.run(&[3, 1, 7], false, &mut |_, _, _, _| Ok(())).unwrap().mean();
    assert_ne!(likelihood(&own_factors), likelihood(&plain));
    for (kind, problem) in [("yarn", "by \"yarn\""), ("longrope", "by \"longrope\""), ("none", "contradicts")] {
        place.refuses(scaled(Some(kind), factor, 4.0), problem);
    }
    for bad in [-1.0, f64::NAN, f64::INFINITY] {
        let file = Gguf::tiny().raw(factor, value(12, &bad.to_le_bytes()));
        place.refuses(place.model(&file), "\"llama.rope.scaling.factor\" is");
    }
    let two = Gguf::tiny().set(factor, json!(2.0)).set("llama.rope.scale_linear", json!(4.0));
    place.refuses(place.model(&two), "contradicts");
}

/// Where a file does not say whether texts begin with a token, its pre-tokenizer does, as in llama.cpp.
#[test]
fn begin_tokens_are_those_of_llama_cpp() {
    let place = Place::new();
    let more = [("<s>", 3), ("</s>", 3)];
    let file = |pre: &str| Gguf::speaking(pre, &more).set("tokenizer.ggml.bos_token_id", json!(260));
    let encode = |file: &Gguf| place.tokenizer(file).map(|t| (t.encode("hello").unwrap(), t.begin(), t.end()));
    let add = "tokenizer.ggml.add_bos_token";
    for pre in ["llama-bpe", "llama3", "llama-v3"] {
        assert_eq!(encode(&file(pre)).unwrap(), (vec![260, 259], Some(260), None), "{pre}");
        assert_eq!(encode(&file(pre).set(add, json!(false))).unwrap(), (vec![259], None, None), "{pre}");
    }
    for pre in ["smollm", "starcoder", "refact", "gpt-2"] {
        assert_eq!(encode(&file(pre)).unwrap(), (vec![259], None, None), "{pre}");
        assert_eq!(encode(&file(pre).set(add, json!(true))).unwrap(), (vec![260, 259], Some(260), None), "{pre}");
    }
    let ends = |file: Gguf| file.set("tokenizer.ggml.add_eos_token", json!(true));
    let ended = ends(file("llama-bpe")).set("tokenizer.ggml.eos_token_id", json!(261));
    assert_eq!(encode(&ended).unwrap(), (vec![260, 259, 261], Some(260), Some(261)));
    // Which token it is must be said, and be there.
    place.refuses(encode(&Gguf::speaking("llama-bpe", &more)), "no \"tokenizer.ggml.bos_token_id\"");
    place.refuses(encode(&ends(file("smollm"))), "no \"tokenizer.ggml.eos_token_id\"");
    for outside in [262u32, 99_999, u32::MAX] {
        let file = file("llama-bpe").set("tokenizer.ggml.bos_token_id", json!(outside));
        let expected = format!("\"tokenizer.ggml.bos_token_id\" is {outside}, but there are 262 tokens, 0 to 261");
        place.refuses(encode(&file), &expected);
    }
    for unusable in [json!(-1), json!("260"), json!(260.0)] {
        let file = file("llama-bpe").set("tokenizer.ggml.bos_token_id", unusable);
        place.refuses(encode(&file), "no usable \"tokenizer.ggml.bos_token_id\"");
    }
    place.refuses(encode(&file("smollm").set(add, json!(1))), "no usable \"tokenizer.ggml.add_bos_token\"");
}

/// Unknown, control and user-defined tokens are found as they are written, the longest first.
#[test]
fn written_tokens_are_found_in_the_text() {
    let place = Place::new();
    let more = [
        ("<fim>", 4),
        ("<|end|>", 3),
        ("<unk>", 2),
        ("<normal>", 1),
        ("<unused>", 5),
        ("ab", 4),
        ("bcd", 4),
        ("é<", 4),
        ("", 4),
    ];
    let tokenizer = place.tokenizer(&Gguf::speaking("gpt-2", &more)).unwrap();
    let bytes = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
    let encode = |text: &str| tokenizer.encode(text).unwrap();
    assert_eq!(encode("hello<fim>hello"), [259, 260, 259]);
    assert_eq!(encode("<fim><fim>"), [260, 260]);
    assert_eq!(encode("<|end|>x<unk>"), [261, u32::from(b'x'), 262]);
    // Those that are not written but merged have no merges here.
    for text in ["<normal>", "<unused>", "<fi", "fim>"] {
        assert_eq!(encode(text), bytes(text), "{text}");
    }
    assert_eq!(encode("abc"), [265, u32::from(b'c')]);
    // The longer token takes its place first, not the one further left.
    assert_eq!(encode("abcd"), [u32::from(b'a'), 266]);
    // Bytes that a token stands for are counted as written, and as merged elsewhere.
    assert_eq!(encode("é<é"), [267, 0xc3, 0xa9]);
    assert_eq!(encode(""), [0; 0]);
    let long = "hello<fim>".repeat(10_000);
    assert!(tokenizer.encode(&long).unwrap_err().to_string().contains("more than the model's context can hold"));
}

#[test]
fn tokenizers_that_contradict_themselves() {
    let place = Place::new();
    let speaking = || Gguf::speaking("smollm", &[("<fim>", 4)]);
    let without = |key: &str| place.tokenizer(&speaking().without(key));
    place
        .refuses(without("tokenizer.ggml.pre"), "does not say how its tokenizer splits texts (\"tokenizer.ggml.pre\")");
    place.refuses(without("tokenizer.ggml.model"), "has no tokenizer");
    place.refuses(without("tokenizer.ggml.tokens"), "no usable \"tokenizer.ggml.tokens\"");
    // Without kinds, all tokens are ordinary ones.
    let plain = without("tokenizer.ggml.token_type").unwrap();
    assert_eq!(plain.encode("<fim>").unwrap(), "<fim>".bytes().map(u32::from).collect::<Vec<_>>());
    let kinds = |value: Value| place.tokenizer(&speaking().set("tokenizer.ggml.token_type", value));
    place.refuses(kinds(json!([1, 4])), "has 261 tokens, but the kinds of 2");
    place.refuses(kinds(json!("x")), "no usable \"tokenizer.ggml.token_type\"");
    place.refuses(kinds(json!([1.5])), "no usable \"tokenizer.ggml.token_type\"");
    let pre = |value: Value| place.tokenizer(&speaking().set("tokenizer.ggml.pre", value));
    place.refuses(pre(json!("default")), "splits texts as \"default\"");
    place.refuses(pre(json!("tekken")), "splits texts as \"tekken\"");
    place.refuses(pre(json!(3)), "no usable \"tokenizer.ggml.pre\"");
    let rows = speaking().with("token_embd.weight", &[8, 260], 0, floats(8 * 260, 1.0));
    place.refuses(place.tokenizer(&rows), "has 261 tokens, but its embedding 260");
    // Texts that are not UTF-8 are no texts.
    let bytes = [&8u32.to_le_bytes()[..], &1u64.to_le_bytes(), &2u64.to_le_bytes(), b"\xff\xfe"].concat();
    place.refuses(
        place.tokenizer(&speaking().raw("tokenizer.ggml.tokens", value(9, &bytes))),
        "no usable \"tokenizer.ggml.tokens\"",
    );
}

/// Sizes, counts and places that cannot be.
#[test]
fn headers_are_believed_in_nothing() {
    let place = Place::new();
    let tensor = |dimensions: &[u64], format: u32, bytes: usize| {
        place.open(&Gguf::tiny().with("x", dimensions, format, vec![0; bytes]).bytes())
    };
    place.refuses(tensor(&[0], 0, 0), "tensor \"x\" has the shape [0], so no numbers");
    place.refuses(tensor(&[1, 1, 1, 1, 1], 0, 4), "tensor \"x\" has 5 dimensions, more than 4");
    place.refuses(tensor(&[1 << 32, 1 << 32], 0, 4), "too large for any file");
    place.refuses(tensor(&[u64::MAX], 0, 4), "too large for any file");
    place.refuses(tensor(&[1 << 61], 0, 4), "is truncated: tensor \"x\" ends at byte");
    place.refuses(tensor(&[1 << 50], 0, 4), "is truncated: tensor \"x\" ends at byte");
    place.refuses(tensor(&[16, 2], 8, 34), "rows of 16 numbers, which are no blocks of 32");
    assert!(tensor(&[], 0, 4).is_ok() && tensor(&[1, 1, 1, 1], 0, 4).is_ok());
    let tiny = Gguf::tiny();
    place.refuses(
        place.open(&tiny.laid_out(|k, offset| if k == 3 { offset + 8 } else { offset })),
        "is no multiple of the alignment 32",
    );
    place.refuses(place.open(&tiny.laid_out(|k, offset| if k == 3 { 0 } else { offset })), "overlap from byte");
    let far = place.open(&tiny.laid_out(|k, offset| if k == 3 { u64::MAX - 31 } else { offset }));
    place.refuses(far, "is truncated: tensor \"blk.0.attn_q.weight\"");
    for name in ["", "a\nb", "\u{1b}[31m"] {
        place.refuses(place.open(&tiny.clone().set(name, json!(1)).bytes()), "is damaged: a key");
        place.refuses(place.open(&tiny.clone().with(name, &[1], 0, vec![0; 4]).bytes()), "is damaged: a tensor");
    }
    let key = |typed: Vec<u8>| place.open(&tiny.clone().raw("general.x", typed).bytes());
    place.refuses(key(value(7, &[2])), "has a \"general.x\" in its metadata that is neither true nor false but 2");
    place.refuses(key(value(13, &[0; 8])), "is of a type that does not exist, number 13");
    place.refuses(key(value(8, &u64::MAX.to_le_bytes())), "is truncated");
    let list = |kind: u32, length: u64| value(9, &[&kind.to_le_bytes()[..], &length.to_le_bytes()].concat());
    for kind in 0..=12 {
        place.refuses(key(list(kind, u64::MAX)), "is truncated");
        place.refuses(key(list(kind, 1 << 40)), "is truncated");
    }
    let deep = value(9, &[&9u32.to_le_bytes()[..], &1u64.to_le_bytes()].concat().repeat(1000));
    place.refuses(key(deep), "lists in lists, more than 4 deep");
    // Counts of keys and tensors.
    let bytes = tiny.bytes();
    for at in [8, 16] {
        for count in [u64::MAX, 1 << 40, 1 << 20] {
            let file = [&bytes[..at], &count.to_le_bytes(), &bytes[at + 8..]].concat();
            place.refuses(place.open(&file), "is truncated or damaged");
        }
    }
    let list =
        |length: usize| value(9, &[&0u32.to_le_bytes()[..], &(length as u64).to_le_bytes(), &vec![0; length]].concat());
    place.refuses(key(list((1 << 23) + 1)), "brings the entries of all lists to more than 8388608");
}

/// Cut anywhere, a file is refused.
#[test]
fn truncated_files_are_refused_at_every_byte() {
    let place = Place::new();
    let bytes = Gguf::speaking("llama-bpe", &[]).bytes();
    for end in 0..bytes.len() {
        let expected = if end < 4 { "is not a GGUF file" } else { "is truncated" };
        place.refuses(place.open(&bytes[..end]), expected);
    }
    assert!(place.open(&bytes).is_ok());
}

/// Damaged anywhere, a file is refused in one line or gives finite numbers; never a panic, nor memory without bound.
#[test]
fn damaged_files_do_no_harm() {
    let place = Place::new();
    let whole =
        Gguf::speaking("llama-bpe", &[("<s>", 3), ("<fim>", 4)]).set("tokenizer.ggml.bos_token_id", json!(260)).bytes();
    // The header, where damage does most, ends before the tensors.
    let header = whole.len() - (8 * 262 + 8 + 3 * 8 * 12 + 2 * 8 + 2 * 64 + 2 * 32) * 4;
    let mut state = 1u64;
    let mut random = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let (mut read, mut refused) = (0, 0);
    for _ in 0..6000 {
        let mut bytes = whole.clone();
        for _ in 0..=random(3) {
            let at = random(header as u64) as usize;
            match random(4) {
                0 => bytes[at] ^= 1 << random(8),
                1 => bytes[at] = random(256) as u8,
                2 => {
                    let extreme = [0, 1, 0x7f, u64::MAX, 1 << 31, 1 << 40, 1 << 63][random(7) as usize];
                    bytes[at..at + 8].copy_from_slice(&extreme.to_le_bytes());
                }
                _ => {
                    // A piece of the file in a place that is not its own.
                    let from = random(header as u64) as usize;
                    let piece = bytes[from..from + 16].to_vec();
                    bytes[at..at + 16].copy_from_slice(&piece);
                }
            }
        }
        let outcome = place.open(&bytes).and_then(|mut file| {
            let tokens =
                Tokenizer::read(&file).and_then(|tokenizer| tokenizer.encode("hello <fim> 12")).unwrap_or(vec![1, 2]);
            Llama::check(&file, &tokens, 1 << 24)?;
            Llama::read(&mut file, &mut |_, _| Ok(()))?.run(&tokens, false, &mut |_, _, _, _| Ok(()))
        });
        match outcome {
            Ok(likelihood) => {
                assert!(likelihood.negative_log_likelihoods.iter().all(|nll| nll.is_finite()));
                read += 1;
            }
            Err(error) => {
                assert!(!error.to_string().contains('\n'), "{error}");
                refused += 1;
            }
        }
    }
    let largest = LARGEST.get();
    println!("{read} read, {refused} refused, the largest piece of memory {largest} bytes");
    assert!(read > 100 && refused > 1000, "{read} {refused}");
    // Entries of lists are 32 bytes for at least one of the file, in a list that may be twice as long as it must;
    // models are held to 2^24 bytes above.
    assert!(largest <= 1 << 24 && 64 * whole.len() <= 1 << 24, "{largest}");
}

/// The memory for the weights is found out before it is taken.
#[test]
fn models_beyond_memory_are_refused_before_they_are_read() {
    let place = Place::new();
    let file = place.open(&Gguf::tiny().bytes()).unwrap();
    let message = |memory: u64| Llama::check(&file, &[1, 2], memory).map_err(|e| e.to_string());
    assert!(
        message(1000)
            .unwrap_err()
            .contains("needs 0.00 GiB of memory for its weights in single precision and 2 tokens")
    );
    assert!(message(1000).unwrap_err().starts_with("model: "));
    assert!(message(1 << 20).is_ok());
    let whole = Gguf::tiny().set("llama.context_length", json!(2_000_000_000u32));
    let file = place.open(&whole.bytes()).unwrap();
    let error = Llama::check(&file, &vec![1; 3_000_000], 1 << 30).unwrap_err();
    assert!(matches!(error, Error::TooCostly { .. }), "{error}");
    // A file with holes takes no room on the disk; the 32 GiB of numbers in it would in memory, with as much twice while they are read, and 8 GiB of logits.
    let mut huge = Gguf::tiny().without("token_embd.weight");
    huge.tensors.push(("token_embd.weight".into(), vec![8, 1 << 30], 0, Vec::new()));
    fs::write(place.path(), huge.bytes()).unwrap();
    fs::OpenOptions::new().write(true).open(place.path()).unwrap().set_len(33 << 30).unwrap();
    let file = File::open(&place.path()).unwrap();
    let error = Llama::check(&file, &[1, 2], 32 << 30).unwrap_err().to_string();
    assert!(error.contains("needs 104.00 GiB") && error.contains("above the limit of 32.00 GiB"), "{error}");
}

/// The program knows the limit of its own process.
#[cfg(target_os = "linux")]
#[test]
fn the_limit_of_the_process_counts() {
    let place = Place::new();
    let mut large = Gguf::tiny().without("token_embd.weight");
    large.tensors.push(("token_embd.weight".into(), vec![8, 1 << 26], 0, Vec::new()));
    fs::write(place.path(), large.bytes()).unwrap();
    fs::OpenOptions::new().write(true).open(place.path()).unwrap().set_len(3 << 30).unwrap();
    fs::write(place.folder.path().join("ids.json"), "[1, 2]").unwrap();
    let limited = "ulimit -v 4000000; exec \"$0\" xsa measure --model model.gguf --tokens ids.json --threads 2";
    let program = env!("CARGO_BIN_EXE_headflow");
    let mut shell = std::process::Command::new("sh");
    let output = shell.args(["-c", limited, program]).current_dir(place.folder.path()).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.starts_with("headflow: model: needs ") && error.trim_end().lines().count() == 1, "{error}");
    assert!(error.contains("above the limit of") && !place.folder.path().join("results").exists(), "{error}");
}

/// What the program says and writes of a model whose name is not fit to be shown.
#[test]
fn names_out_of_files_command_nothing() {
    let place = Place::new();
    let folder = place.folder.path();
    fs::write(folder.join("text.txt"), "hello world <fim>").unwrap();
    let measure = ["xsa", "measure", "--model", "model.gguf", "--text", "text.txt", "--out"];
    let name = format!("ctl \u{1} \u{1b}[31mred\nline2 \u{9b}2J \u{202e}<&{}", "long ".repeat(20_000));
    for name in [name.clone(), "y".repeat(100_000)] {
        let file = Gguf::speaking("llama-bpe", &[("<s>", 3), ("<fim>", 4)])
            .set("tokenizer.ggml.bos_token_id", json!(260))
            .set("general.name", json!(name));
        fs::write(place.path(), file.bytes()).unwrap();
        let out = if name.starts_with('y') { "long" } else { "\u{1b}[31mout" };
        let text = ok(folder, &[&measure[..], &[out]].concat());
        assert!(!text.contains(|c: char| c.is_control() && c != '\n') && !text.contains('\u{202e}'), "{text:?}");
        assert!(
            text.contains("with the begin token 260") && text.lines().all(|line| line.chars().count() < 300),
            "{text}"
        );
        let svg = fs::read_to_string(folder.join(out).join("xsa-model.svg")).unwrap();
        assert!(!svg.contains(|c: char| c.is_control() && c != '\n') && !svg.contains('\u{202e}'));
        assert!(svg.len() < 1_000_000 && svg.contains('…'), "{}", svg.len());
        let result: Value =
            serde_json::from_str(&fs::read_to_string(folder.join(out).join("result.json")).unwrap()).unwrap();
        assert_eq!(result["model"]["name"], name);
        assert_eq!(result["tokenizer"], json!({"pre": "llama-bpe", "begin_token": 260, "end_token": null}));
        assert_eq!(result["token_ids"][0], 260);
        assert_eq!(result["token_ids"].as_array().unwrap().last().unwrap(), 261);
    }
    // As a document, the name is what it was, and still commands nothing.
    let file = Gguf::speaking("llama-bpe", &[("<s>", 3)])
        .set("tokenizer.ggml.bos_token_id", json!(260))
        .set("general.name", json!(name));
    fs::write(place.path(), file.bytes()).unwrap();
    let output = headflow(folder, &[&measure[..], &["again", "--json"]].concat());
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(!text.contains(|c: char| c.is_control() && c != '\n'));
    assert_eq!(common::document(&text)["model"]["name"], name);
    // Drawn from a result that somebody else wrote.
    let mut other = common::document(&text);
    other["title"] = json!("\u{1b}]0;title\u{7}, \u{85}next");
    other["predictions"][0]["name"] = json!("z".repeat(1 << 20));
    fs::write(folder.join("again/result.json"), other.to_string()).unwrap();
    ok(folder, &["figure", "xsa-model", "--from", "again"]);
    let svg = fs::read_to_string(folder.join("again/xsa-model.svg")).unwrap();
    assert!(!svg.contains(|c: char| c.is_control() && c != '\n') && svg.len() < 1_000_000);
    assert!(svg.contains(r"\u001b]0;title\u0007"));
    // And in what is refused.
    let key = Gguf::tiny().set("llama.\u{85}x", json!(1));
    fs::write(place.path(), key.bytes()).unwrap();
    let error = headflow(folder, &[&measure[..], &["none"]].concat()).stderr;
    assert!(!String::from_utf8(error).unwrap().trim_end().contains(char::is_control));
}

/// Lists of tokens as people and programs write them.
#[test]
fn lists_of_tokens() {
    let place = Place::new();
    let folder = place.folder.path();
    fs::write(place.path(), Gguf::tiny().bytes()).unwrap();
    let measure = ["xsa", "measure", "--model", "model.gguf", "--tokens", "ids.json"];
    let write = |text: &str| fs::write(folder.join("ids.json"), text).unwrap();
    for (number, text) in
        ["\u{feff}[1, 2]", " {\"name\": \"x\", \"tokens\": [1, 2]}", "\n[1,2]"].into_iter().enumerate()
    {
        write(text);
        let result = printed(folder, &[&measure[..], &["--out", &format!("{number}")]].concat());
        assert_eq!((&result["token_ids"], &result["tokenizer"]), (&json!([1, 2]), &Value::Null));
    }
    write("{\"tokens\": [1, 2], \"tokens\": [3, 4]}");
    refused(folder, &measure, "ids.json: the field \"tokens\" is given twice");
    write("[1, 4294967296]");
    refused(folder, &measure, "ids.json: is not a list of token ids");
    write(&format!("[{}1]", "1,".repeat(1 << 23)));
    refused(folder, &measure, "ids.json: has more than 16777216 bytes");
    if Path::new("/dev/zero").exists() {
        let endless = ["xsa", "measure", "--model", "model.gguf", "--text", "/dev/zero"];
        refused(folder, &endless, "/dev/zero: has more than 16777216 bytes");
        let endless = ["xsa", "measure", "--model", "/dev/zero", "--tokens", "ids.json"];
        refused(folder, &endless, "/dev/zero: is not a file");
    }
}
