//! A real language model against independent values, and files that cannot be used. Needs the model that
//! `scripts/fetch-model` fetches.

mod common;
#[path = "common/gguf.rs"]
mod gguf;

use std::fs;
use std::path::{Path, PathBuf};

use common::{headflow, printed, refused};
use gguf::{Gguf, floats};
use headflow::xsa::gguf::File;
use headflow::xsa::llama::Likelihood;
use headflow::xsa::tokenizer::Tokenizer;
use headflow::xsa::{Llama, Measurement, SelfAttention};
use serde_json::{Value, json};

fn model_path() -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(path.exists(), "the model is not there: run scripts/fetch-model");
    path
}

fn reference(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference/xsa").join(name);
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn text(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference/xsa").join(name)).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn model() -> Llama {
    Llama::read(&mut File::open(&model_path()).unwrap(), &mut |_, _| Ok(())).unwrap()
}

/// One vector of the reference, `y`, `v` or `z` of a layer, head and position.
type Vectors = (String, [Vec<f64>; 3]);

fn run(
    model: &Llama,
    tokens: &[u32],
    wanted: &[(usize, usize, usize)],
) -> (Likelihood, Vec<Measurement>, Vec<Vectors>) {
    let (mut layers, mut vectors) = (Vec::new(), Vec::new());
    let likelihood = model
        .run(tokens, false, &mut |layer, attention, shape, inputs| {
            layers.push(attention.measure(shape, inputs)?);
            if wanted.iter().any(|w| w.0 == layer) {
                let y = attention.forward(shape, inputs)?;
                let z = SelfAttention { exclusive: true, ..attention.clone() }.forward(shape, inputs)?;
                for (_, head, position) in wanted.iter().filter(|w| w.0 == layer) {
                    let row = |data: &[f32], heads: usize, head: usize| {
                        let at = (position * heads + head) * shape.value_size;
                        data[at..at + shape.value_size].iter().map(|x| f64::from(*x)).collect::<Vec<f64>>()
                    };
                    let v = row(inputs.values, shape.key_value_heads, shape.key_value_head(*head));
                    let found = [row(&y.outputs, shape.heads, *head), v, row(&z.outputs, shape.heads, *head)];
                    vectors.push((format!("{layer}/{head}/{position}"), found));
                }
            }
            Ok(())
        })
        .unwrap();
    (likelihood, layers, vectors)
}

/// A number of a head.
type OfHead = fn(&Measurement, usize) -> f64;

/// `reference/xsa/golden_alice0.json`: every head of every layer, 45 vectors, logits and likelihoods.
#[test]
fn a_real_model_gives_the_reference_values() {
    let golden = reference("golden_alice0.json");
    let vectors = golden["golden_vectors_layer_head_pos"].as_object().unwrap();
    let wanted: Vec<(usize, usize, usize)> = vectors
        .keys()
        .map(|key| {
            let parts: Vec<usize> = key.split('/').map(|p| p.parse().unwrap()).collect();
            (parts[0], parts[1], parts[2])
        })
        .collect();
    assert_eq!(wanted.len(), 45);
    let (likelihood, layers, found) = run(&model(), &ids(&golden["tokens"]), &wanted);

    let heads: [(&str, OfHead); 5] = [
        ("cos", |m, h| m.mean(&m.cosine, h)),
        ("aii", |m, h| m.mean(&m.self_attention, h)),
        ("sum_a2", |m, h| m.mean(&m.squared_attention, h)),
        ("sink", |m, h| m.mean(&m.first_attention, h)),
        ("removed", Measurement::removed),
    ];
    for (name, of) in heads {
        let mut worst = 0.0f64;
        for (layer, measured) in layers.iter().enumerate() {
            for head in 0..9 {
                worst = worst.max((of(measured, head) - golden[name][layer][head].as_f64().unwrap()).abs());
            }
        }
        println!("{name}: off by {worst:.1e}");
        assert!(worst < 1e-5, "{name}: {worst}");
    }
    for (layer, measured) in layers.iter().enumerate() {
        for owner in 0..3 {
            assert!((measured.rho[owner] - golden["rho"][layer][owner].as_f64().unwrap()).abs() < 1e-5);
            assert!(
                (measured.rho_without_first[owner] - golden["rho_x0"][layer][owner].as_f64().unwrap()).abs() < 1e-5
            );
        }
    }
    let overall = |of: OfHead| layers.iter().flat_map(|m| (0..9).map(move |h| of(m, h))).sum::<f64>() / 270.0;
    assert!((overall(heads[0].1) - 0.408_038).abs() < 1e-6);
    assert!((overall(heads[4].1) - 0.261_252).abs() < 1e-6);

    assert_eq!(found.len(), 45);
    let mut worst = 0.0f64;
    for (key, [y, v, z]) in &found {
        let exact = |name: &str| serde_json::from_value::<Vec<f64>>(vectors[key][name].clone()).unwrap();
        let norm = |a: &[f64]| a.iter().map(|x| x * x).sum::<f64>().sqrt();
        let off = |a: &[f64], b: &[f64]| norm(&a.iter().zip(b).map(|(a, b)| a - b).collect::<Vec<_>>());
        // z can be all rounding (position 0), so it is measured against y.
        for (found, name, scale) in [(y, "y", "y"), (v, "v", "v"), (z, "z", "y")] {
            worst = worst.max(off(found, &exact(name)) / norm(&exact(scale)));
        }
    }
    println!("y, v, z: off by {worst:.1e}");
    assert!(worst < 1e-4, "{worst}");

    let mut logits: Vec<(usize, f32)> = likelihood.last_logits.iter().copied().enumerate().collect();
    logits.sort_by(|a, b| b.1.total_cmp(&a.1));
    for (found, exact) in logits.iter().zip(golden["last_logits_top20"].as_array().unwrap()) {
        assert_eq!(found.0 as u64, exact[0].as_u64().unwrap());
        assert!((f64::from(found.1) - exact[1].as_f64().unwrap()).abs() < 1e-3);
    }
    for (found, exact) in likelihood.negative_log_likelihoods.iter().zip(golden["nll_first16"].as_array().unwrap()) {
        assert!((found - exact.as_f64().unwrap()).abs() < 1e-3);
    }
    assert!((likelihood.mean() - golden["mean_nll"].as_f64().unwrap()).abs() < 1e-5);
}

/// Texts give the reference's tokens: no begin token, digits one by one, special tokens as such.
#[test]
fn texts_give_the_reference_tokens() {
    let tokenizer = Tokenizer::read(&File::open(&model_path()).unwrap()).unwrap();
    let tokens = reference("tokens.json");
    assert_eq!(tokenizer.encode(&text("alice.txt")).unwrap(), ids(&tokens["sequences_512"][0]));
    assert_eq!(tokenizer.encode(&text("alice_2048.txt")).unwrap(), ids(&tokens["sequence_2048"]));
    let digits = tokenizer.encode("1234").unwrap();
    assert_eq!(digits, "1234".chars().map(|d| tokenizer.encode(&d.to_string()).unwrap()[0]).collect::<Vec<_>>());
    assert_eq!(tokenizer.encode("<|im_start|>").unwrap(), [1]);
    // Any text keeps all of its bytes.
    for text in ["naïve café, 数学 → ∑ 🙂\t\r\n  x", "<|im_start|>é<|im_end|>"] {
        assert!(tokenizer.encode(text).is_ok(), "{text}");
    }
}

/// The same bits with 1, 2 and 3 threads.
#[test]
fn threads_change_nothing() {
    let model = model();
    let tokens = ids(&reference("tokens.json")["sequences_512"][1])[..150].to_vec();
    let with = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| run(&model, &tokens, &[]))
    };
    let one = with(1);
    assert_eq!(one, with(2));
    assert_eq!(one, with(3));
}

/// What the program prints, writes and draws; XSA after the fact makes the model worse.
#[test]
fn the_program_measures_a_text() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("alice.txt"), text("alice.txt")).unwrap();
    let model = model_path();
    let result = printed(
        folder.path(),
        &["xsa", "measure", "--model", model.to_str().unwrap(), "--text", "alice.txt", "--out", "out"],
    );
    assert!((result["mean_nll"].as_f64().unwrap() - 3.208_66).abs() < 1e-4);
    assert!((result["overall"]["cos"].as_f64().unwrap() - 0.408_038).abs() < 1e-6);
    for name in ["cos", "aii", "sum_a2", "sink", "removed", "rho"] {
        let heads = if name == "rho" { 3 } else { 9 };
        let layers = result[name].as_array().unwrap();
        assert_eq!((layers.len(), layers[29].as_array().unwrap().len()), (30, heads), "{name}");
    }
    let exclusive = result["exclusive"]["perplexity"].as_f64().unwrap();
    assert!(exclusive > result["perplexity"].as_f64().unwrap());
    assert!(result["exclusive"]["why"].as_str().unwrap().contains("not trained with XSA"));
    assert!(result["positions"].as_str().unwrap().contains("position 0"));
    // The figures of the issue; the last two were measured here.
    let correlation = |n: usize| result["predictions"][n]["correlation"].as_f64().unwrap();
    for (n, (name, at_least)) in
        [("closed form", 0.81), ("norm-weighted", 0.85), ("attended values", 0.985), ("exact numerator", 0.979)]
            .into_iter()
            .enumerate()
    {
        assert_eq!(result["predictions"][n]["name"], name);
        assert!(correlation(n) > at_least, "{name}: {}", correlation(n));
    }
    for file in ["result.json", "positions.npz", "xsa-model.png", "xsa-model.svg"] {
        assert!(fs::metadata(folder.path().join("out").join(file)).unwrap().len() > 1000, "{file}");
    }
    // Position by position: the means of the document.
    let mut npz =
        ndarray_npy::NpzReader::new(fs::File::open(folder.path().join("out/positions.npz")).unwrap()).unwrap();
    let cos: ndarray::Array3<f32> = npz.by_name("cos").unwrap();
    assert_eq!(cos.dim(), (30, 9, 512));
    let mean = cos.slice(ndarray::s![18, 8, 1..]).iter().map(|c| f64::from(*c)).sum::<f64>() / 511.0;
    assert!((mean - result["cos"][18][8].as_f64().unwrap()).abs() < 1e-6);
    // The same from its tokens.
    fs::write(folder.path().join("ids.json"), result["token_ids"].to_string()).unwrap();
    let again = printed(
        folder.path(),
        &["xsa", "measure", "--model", model.to_str().unwrap(), "--tokens", "ids.json", "--out", "again"],
    );
    assert_eq!(result["cos"], again["cos"]);
}

/// Formats that the issue names, against their definitions in the GGUF specification.
#[test]
fn formats_are_read_as_specified() {
    let folder = tempfile::tempdir().unwrap();
    let read = |format: u32, bytes: Vec<u8>, count: usize| {
        let path = folder.path().join("x.gguf");
        fs::write(&path, Gguf::tiny().with("x", &[count as u64], format, bytes).bytes()).unwrap();
        File::open(&path).unwrap().tensor("x", &[count]).unwrap()
    };
    let half = |x: f32| -> [u8; 2] {
        // Small numbers with few digits: exact halves.
        let bits = x.to_bits();
        let exponent = ((bits >> 23 & 255) as i32 - 127 + 15) as u32;
        ((bits >> 16 & 0x8000) | exponent << 10 | (bits >> 13 & 0x3ff)).to_le_bytes()[..2].try_into().unwrap()
    };
    assert_eq!(read(0, [1.5f32, -2.0].iter().flat_map(|x| x.to_le_bytes()).collect(), 2), [1.5, -2.0]);
    assert_eq!(read(1, [0.25f32, -3.5].iter().flat_map(|x| half(*x)).collect(), 2), [0.25, -3.5]);
    // Q8_0: a scale and 32 signed bytes.
    let bytes: Vec<i8> = (0..32).map(|k| (k * 8 - 128) as i8).collect();
    let block = [&half(0.5)[..], &bytes.iter().map(|b| *b as u8).collect::<Vec<_>>()].concat();
    assert_eq!(read(8, block, 32), bytes.iter().map(|b| 0.5 * f32::from(*b)).collect::<Vec<_>>());
    // Q4_1: a scale, a minimum, and 16 bytes: low nibbles are elements 0 to 15, high ones 16 to 31.
    let nibbles: Vec<u8> = (0..32).map(|k| (k * 7 % 16) as u8).collect();
    let packed: Vec<u8> = (0..16).map(|k| nibbles[k] | nibbles[k + 16] << 4).collect();
    let block = [&half(0.25)[..], &half(-1.5)[..], &packed].concat();
    assert_eq!(read(3, block, 32), nibbles.iter().map(|n| 0.25 * f32::from(*n) - 1.5).collect::<Vec<_>>());
}

/// A tiny model written out in double precision: the forward pass, grouped heads and rotary pairs included.
#[test]
fn a_tiny_model_is_its_equations() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    let mut biased = Gguf::tiny();
    for (name, size, scale) in [("q", 8, 0.4), ("k", 4, 0.5), ("v", 4, 0.6), ("output", 8, 0.3)] {
        biased.add(&format!("blk.1.attn_{name}.bias"), &[size], scale);
    }
    let mut first = Vec::new();
    for file in [Gguf::tiny(), biased] {
        fs::write(&path, file.bytes()).unwrap();
        first.push(equations(&Llama::read(&mut File::open(&path).unwrap(), &mut |_, _| Ok(())).unwrap()));
    }
    assert!((first[0] - first[1]).abs() > 1e-3, "the biases do something: {first:?}");
}

/// Compares the model with its equations; the likelihood of the second token.
fn equations(model: &Llama) -> f64 {
    let tokens = [3u32, 0, 11, 7, 3];
    let likelihood = model.run(&tokens, false, &mut |_, _, _, _| Ok(())).unwrap();

    let apply = |w: &[f32], x: &[f64]| -> Vec<f64> {
        w.chunks(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum()).collect()
    };
    let biased = |mut x: Vec<f64>, bias: &Option<Vec<f32>>| {
        x.iter_mut().zip(bias.iter().flatten()).for_each(|(x, b)| *x += f64::from(*b));
        x
    };
    let normed = |x: &[f64], w: &[f32]| -> Vec<f64> {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        x.iter().zip(w).map(|(x, w)| x / (mean + 1e-5).sqrt() * f64::from(*w)).collect()
    };
    let turned = |x: &[f64], position: usize| -> Vec<f64> {
        let mut out = Vec::new();
        for (k, pair) in x.chunks(2).enumerate() {
            let (sin, cos) = (position as f64 * 10_000f64.powf(-((k % 2) as f64) / 2.0)).sin_cos();
            out.extend([pair[0] * cos - pair[1] * sin, pair[0] * sin + pair[1] * cos]);
        }
        out
    };
    let mut states: Vec<Vec<f64>> = tokens
        .iter()
        .map(|t| model.embedding[*t as usize * 8..(*t as usize + 1) * 8].iter().map(|x| f64::from(*x)).collect())
        .collect();
    for layer in &model.layers {
        let inner: Vec<Vec<f64>> = states.iter().map(|x| normed(x, &layer.attention_norm)).collect();
        let keys: Vec<Vec<f64>> = inner
            .iter()
            .enumerate()
            .map(|(i, x)| turned(&biased(apply(&layer.keys, x), &layer.biases.keys), i))
            .collect();
        let values: Vec<Vec<f64>> =
            inner.iter().map(|x| biased(apply(&layer.values, x), &layer.biases.values)).collect();
        for i in 0..tokens.len() {
            let queries = turned(&biased(apply(&layer.queries, &inner[i]), &layer.biases.queries), i);
            let mut y = Vec::new();
            for query in queries.chunks(4) {
                let weights: Vec<f64> = (0..=i)
                    .map(|j| (query.iter().zip(&keys[j]).map(|(q, k)| q * k).sum::<f64>() / 2.0).exp())
                    .collect();
                let total: f64 = weights.iter().sum();
                y.extend((0..4).map(|k| (0..=i).map(|j| weights[j] / total * values[j][k]).sum::<f64>()));
            }
            let attended = biased(apply(&layer.output, &y), &layer.biases.output);
            states[i].iter_mut().zip(&attended).for_each(|(x, a)| *x += a);
            let inner = normed(&states[i], &layer.feed_forward_norm);
            let hidden: Vec<f64> = apply(&layer.gate, &inner)
                .iter()
                .zip(apply(&layer.up, &inner))
                .map(|(g, u)| g / (1.0 + (-g).exp()) * u)
                .collect();
            let down = apply(&layer.down, &hidden);
            states[i].iter_mut().zip(&down).for_each(|(x, d)| *x += d);
        }
    }
    for i in 0..tokens.len() - 1 {
        let logits = apply(&model.embedding, &normed(&states[i], &model.final_norm));
        let exact = logits.iter().map(|l| l.exp()).sum::<f64>().ln() - logits[tokens[i + 1] as usize];
        assert!((likelihood.negative_log_likelihoods[i] - exact).abs() < 1e-5, "{i}");
    }
    likelihood.negative_log_likelihoods[0]
}

/// Every file that cannot be used: one line that says why, and nothing written.
#[test]
fn files_that_cannot_be_used() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("ids.json"), "[1, 2, 3, 4]").unwrap();
    let tiny = Gguf::tiny();
    let measure = |arguments: &[&str], expected: &str| {
        refused(folder.path(), &[&["xsa", "measure"], arguments].concat(), expected);
        assert!(!at("results").exists(), "{arguments:?} left a folder");
    };
    let model = |bytes: &[u8], expected: &str| {
        fs::write(at("model.gguf"), bytes).unwrap();
        measure(&["--model", "model.gguf", "--tokens", "ids.json"], expected);
    };
    // First that the file as it is can be used.
    fs::write(at("good.gguf"), tiny.bytes()).unwrap();
    let result =
        printed(folder.path(), &["xsa", "measure", "--model", "good.gguf", "--tokens", "ids.json", "--out", "good"]);
    assert_eq!(result["cos"].as_array().unwrap().len(), 2);

    measure(&["--model", "none.gguf", "--tokens", "ids.json"], "none.gguf: cannot be opened");
    model(b"", "is not a GGUF file");
    model(b"PK\x03\x04 a zip archive", "is not a GGUF file");
    // Cut anywhere, it is refused as truncated, in the header and in the tensors.
    let whole = tiny.bytes();
    for cut in [5, 12, 30, 200, 700, 1500, whole.len() - 1] {
        model(&whole[..cut], "is truncated");
    }
    model(&[&whole[..4], &9u32.to_le_bytes(), &whole[8..]].concat(), "has a header that cannot be read");
    model(&tiny.clone().set("general.architecture", json!("qwen2")).bytes(), "architecture \"qwen2\"; only \"llama\"");
    model(&tiny.clone().without("general.architecture").bytes(), "\"general.architecture\"");
    model(&tiny.clone().without("llama.block_count").bytes(), "\"llama.block_count\"");
    model(&tiny.clone().set("llama.block_count", json!(0)).bytes(), "\"llama.block_count\" is 0");
    model(&tiny.clone().set("general.alignment", json!(0)).bytes(), "general.alignment");
    model(&tiny.clone().without("blk.1.ffn_up.weight").bytes(), "has no tensor \"blk.1.ffn_up.weight\"");
    model(&tiny.clone().without("token_embd.weight").bytes(), "has no tensor \"token_embd.weight\"");
    let extra = tiny.clone().with("blk.0.ffn_up.bias", &[12], 0, floats(12, 1.0));
    model(&extra.bytes(), "has a tensor \"blk.0.ffn_up.bias\"");
    let shape = tiny.clone().with("blk.0.attn_q.bias", &[4], 0, floats(4, 1.0));
    model(&shape.bytes(), "tensor \"blk.0.attn_q.bias\" has the shape [4], but [8] is needed");
    let shape = tiny.clone().with("blk.0.attn_k.weight", &[8, 8], 0, floats(64, 1.0));
    model(&shape.bytes(), "tensor \"blk.0.attn_k.weight\" has the shape [8, 8], but [4, 8] is needed");
    for (format, name) in
        [(23, "IQ4_XS"), (16, "IQ2_XXS"), (9, "Q8_1"), (15, "Q8_K"), (33, "Q4_0_8_8"), (4711, "number 4711")]
    {
        let spoiled = tiny.clone().with("blk.0.attn_k.weight", &[32, 1], format, vec![0; 64]);
        model(&spoiled.bytes(), &format!("has the format {name}, which is not supported"));
    }
    model(&tiny.clone().set("llama.attention.head_count_kv", json!(3)).bytes(), "3 key-value heads do not divide 2");
    model(&tiny.clone().set("llama.rope.dimension_count", json!(6)).bytes(), "6 entries of a head cannot turn");
    model(&tiny.clone().set("llama.block_count", json!(50_000_000)).bytes(), "20 tensors, too few for 50000000 layers");
    model(&tiny.clone().set("llama.attention.key_length", json!(2_000_000_000)).bytes(), "key_length\" is 2000000000");
    model(&tiny.clone().set("llama.rope.freq_base", json!("x")).bytes(), "no usable \"llama.rope.freq_base\"");
    model(&tiny.clone().set("llama.rope.scaling.factor", json!(-4)).bytes(), "\"llama.rope.scaling.factor\"");
    model(&tiny.clone().set("llama.expert_count", json!(8)).bytes(), "\"llama.expert_count\"");
    model(&tiny.clone().set("llama.rope.scaling.type", json!("yarn")).bytes(), "by \"yarn\"");
    let nan = f32::NAN.to_le_bytes().repeat(32);
    let spoiled = tiny.clone().with("blk.1.attn_v.weight", &[8, 4], 0, nan);
    model(&spoiled.bytes(), "layer 1, head 0, position 0: the value is not finite");

    // Tokens.
    let tokens = |content: &str, expected: &str| {
        fs::write(at("some.json"), content).unwrap();
        measure(&["--model", "good.gguf", "--tokens", "some.json"], expected);
    };
    tokens("[1, 12]", "id 12 at position 1 is out of range: the vocabulary has 12 tokens, 0 to 11");
    tokens("[1, -2]", "is not a list of token ids");
    tokens("[1, 2.5]", "is not a list of token ids");
    tokens("[[1, 2]]", "is not a list of token ids");
    tokens("[]", "holds no token");
    tokens("[1]", "is a single token");
    tokens("{\"ids\": [1]}", "is not a list of token ids");
    tokens("[1, 2", "is not JSON");
    tokens(&format!("{:?}", vec![1; 17]), "17 are more than the model's context of 16");
    measure(&["--model", "good.gguf", "--tokens", "none.json"], "none.json: cannot be read");
    measure(&["--model", "good.gguf"], "give --text FILE or --tokens FILE.json");
    measure(&["--tokens", "ids.json"], "give --model FILE.gguf");
    measure(&["--model", "good.gguf", "--tokens", "ids.json", "--text", "x"], "not both");

    // Texts.
    fs::write(at("empty.txt"), "").unwrap();
    fs::write(at("text.txt"), "some text").unwrap();
    fs::write(at("bytes.txt"), b"\xff\xfe\x00").unwrap();
    measure(&["--model", "good.gguf", "--text", "empty.txt"], "empty.txt: is empty");
    measure(&["--model", "good.gguf", "--text", "bytes.txt"], "bytes.txt: cannot be read as text");
    measure(&["--model", "good.gguf", "--text", "text.txt"], "has no tokenizer; give token ids");
    let tokenizer = |kind: &str, pre: &str| {
        fs::write(
            at("model.gguf"),
            tiny.clone().set("tokenizer.ggml.model", json!(kind)).set("tokenizer.ggml.pre", json!(pre)).bytes(),
        )
        .unwrap();
    };
    tokenizer("llama", "default");
    measure(&["--model", "model.gguf", "--text", "text.txt"], "tokenizer of the kind \"llama\"");
    tokenizer("gpt2", "klingon");
    measure(&["--model", "model.gguf", "--text", "text.txt"], "splits texts as \"klingon\"");
    tokenizer("gpt2", "smollm");
    measure(&["--model", "model.gguf", "--text", "text.txt"], "has no usable \"tokenizer.ggml.tokens\"");

    let few = |tokens: Value| {
        let file = tiny.clone().set("tokenizer.ggml.model", json!("gpt2")).set("tokenizer.ggml.pre", json!("smollm"));
        let file = file.set("tokenizer.ggml.tokens", tokens).set("tokenizer.ggml.merges", json!(["H e"]));
        fs::write(at("model.gguf"), file.bytes()).unwrap();
    };
    few(json!(["H", "e"]));
    measure(&["--model", "model.gguf", "--text", "text.txt"], "merges \"H\" and \"e\" to no token");
    few(json!(["H", "e", "He"]));
    measure(&["--model", "model.gguf", "--text", "text.txt"], "has no tokens for 7 of 9 bytes of the text");

    // Folders that were made for nothing go again, all of them.
    fs::write(at("some.json"), "[1, 12]").unwrap();
    measure(&["--model", "good.gguf", "--tokens", "some.json", "--out", "p/a/b"], "id 12 at position 1");
    assert!(!at("p").exists());

    // A result that is there stays.
    let before = fs::read(at("good/result.json")).unwrap();
    measure(&["--model", "good.gguf", "--tokens", "ids.json", "--out", "good"], "already holds a result");
    assert_eq!(before, fs::read(at("good/result.json")).unwrap());
}

/// `--quiet` says nothing; a text figure of every quantity without it.
#[test]
fn what_is_printed() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("tiny.gguf"), Gguf::tiny().bytes()).unwrap();
    fs::write(folder.path().join("ids.json"), "{\"tokens\": [5, 1, 2, 9, 3, 3, 8]}").unwrap();
    let arguments = ["xsa", "measure", "--model", "tiny.gguf", "--tokens", "ids.json"];
    let quiet = headflow(folder.path(), &[&arguments[..], &["--quiet"]].concat());
    assert!(quiet.status.success() && quiet.stdout.is_empty() && quiet.stderr.is_empty());
    let text = String::from_utf8(headflow(folder.path(), &arguments).stdout).unwrap();
    for expected in ["tiny: 2 layers x 2 heads", "position 0 left out", "with XSA switched on", "norm-weighted"] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
}
