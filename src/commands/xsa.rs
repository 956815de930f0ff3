//! `headflow xsa bias` and `headflow xsa measure`: the attention similarity bias of synthetic values and of
//! language models, and the figures `xsa-bias` and `xsa-model`.

use headflow::cost;
use headflow::figures;
use headflow::model::{Error, Watch};
use headflow::phase::{Axis, parse_range};
use headflow::spec::count;
use headflow::xsa;
use headflow::xsa::synthetic::Synthetic;
use serde_json::{Value, json};

use super::figure::failed;
use super::{Clock, folder, headed, illustrated, made, names, print};
use crate::cli::Request;
use crate::progress::{Progress, writing_result};

/// The most cells of a map.
const MOST_CELLS: usize = 10_000;

pub fn run(request: &Request) -> Result<u8, Error> {
    match request.command.as_str() {
        "xsa bias" => bias(request),
        _ => measure(request),
    }
}

/// Draws a result that exists; `xsa-bias` can also be computed.
pub fn figure(request: &Request) -> Result<u8, Error> {
    let name = request.figure.as_deref().unwrap_or_default();
    let Some(from) = &request.from else {
        if name == "xsa-bias" {
            return bias(request);
        }
        return Err(Error::invalid(
            "from",
            "xsa-model draws a result that exists: --from FOLDER, which xsa measure wrote",
        ));
    };
    let out = request.out.as_ref().unwrap_or(from);
    let _made = made(out)?;
    let draw = if name == "xsa-bias" { figures::map } else { figures::xsa_model };
    let files = draw(from, &out.join(name)).map_err(failed)?;
    let clock = Clock::start();
    let result = headed("figure", json!({"from": from}), Value::Null, &clock, json!({"figure": name, "files": files}))?;
    print(request, &result, &format!("{}: {}\n", out.display(), names(out, &files)));
    Ok(0)
}

fn input(error: xsa::Error) -> Error {
    match error {
        xsa::Error::Invalid { field, problem } => Error::invalid(field.replace('_', "-"), problem),
        xsa::Error::Unreadable { place, problem } => Error::unreadable(place, problem),
        xsa::Error::Interrupted => Error::interrupted("xsa"),
        xsa::Error::TooCostly { field, needs, limit, advice } => Error::too_costly(field, needs, limit, advice),
        other => Error::unreadable("attention", other),
    }
}

fn whole(request: &Request, name: &str, default: usize, from: usize, to: usize) -> Result<usize, Error> {
    let Some(text) = request.xsa.get(name) else { return Ok(default) };
    match count(text).and_then(|value| usize::try_from(value).ok()) {
        Some(value) if (from..=to).contains(&value) => Ok(value),
        _ => {
            Err(Error::invalid(name.replace('_', "-"), format!("\"{text}\" is not a whole number from {from} to {to}")))
        }
    }
}

/// A side of the map, with values from `low` to `high`.
fn side(request: &Request, name: &'static str, default: &str, low: f64, high: f64) -> Result<Axis, Error> {
    let text = request.xsa.get(name).map_or(default, String::as_str);
    let flag = name.replace('_', "-");
    let (values, log) = parse_range(&flag, text, false)?;
    match values.iter().find(|v| **v < low || **v > high) {
        Some(value) => Err(Error::invalid(flag, format!("{value} is not between {low} and {high}"))),
        None => Ok(Axis { field: name.into(), values, log }),
    }
}

/// What `xsa bias` computes.
struct BiasMaps {
    rho: Axis,
    self_attention: Axis,
    lengths: Vec<usize>,
    /// All but the three above.
    cell: Synthetic,
}

impl BiasMaps {
    fn parse(request: &Request) -> Result<Self, Error> {
        let lengths = request.xsa.get("lengths").map_or("16,128,1024", String::as_str);
        let length = |text: &str| match count(text).and_then(|length| usize::try_from(length).ok()) {
            Some(length) if (2..=16_384).contains(&length) => Ok(length),
            _ => Err(Error::invalid("lengths", format!("\"{text}\" is not a whole number from 2 to 16384"))),
        };
        let seed = request.xsa.get("seed").map_or("0", String::as_str);
        let spread = request.xsa.get("spread").map_or("1", String::as_str);
        let maps =
            Self {
                rho: side(request, "rho", "0:0.9:16", 0.0, 1.0)?,
                self_attention: side(request, "self_attention", "log:0.01:0.9:16", 1e-6, 1.0 - 1e-6)?,
                lengths: lengths.split(',').map(length).collect::<Result<_, _>>()?,
                cell: Synthetic {
                    tokens: 2,
                    sequences: whole(request, "sequences", 8, 1, 1000)?,
                    key_size: whole(request, "key_size", 128, 1, 65_536)?,
                    value_size: whole(request, "value_size", 128, 1, 65_536)?,
                    rho: 0.0,
                    self_attention: 0.5,
                    spread: spread.parse().ok().filter(|s| (0.0..=10.0).contains(s)).ok_or_else(|| {
                        Error::invalid("spread", format!("\"{spread}\" is not a number from 0 to 10"))
                    })?,
                    seed: count(seed).ok_or_else(|| {
                        Error::invalid("seed", format!("\"{seed}\" is not a whole number from 0 to 2^64 - 1"))
                    })?,
                },
            };
        if maps.rho.values.len() * maps.self_attention.values.len() > MOST_CELLS {
            return Err(Error::invalid("rho", format!("a map has at most {MOST_CELLS} cells")));
        }
        let longest = maps.lengths.iter().max().copied().unwrap_or(0);
        let cells = maps.rho.values.len() * maps.self_attention.values.len() * maps.lengths.len();
        let Synthetic { sequences, key_size, value_size, .. } = maps.cell;
        cost::check_bias_maps(cells, sequences, longest, [key_size, value_size], request.memory)?;
        Ok(maps)
    }

    fn spec(&self) -> Value {
        json!({
            "rho": self.rho.values,
            "self_attention": self.self_attention.values,
            "lengths": self.lengths,
            "sequences": self.cell.sequences,
            "key_size": self.cell.key_size,
            "value_size": self.cell.value_size,
            "spread": self.cell.spread,
            "seed": self.cell.seed,
        })
    }
}

fn bias(request: &Request) -> Result<u8, Error> {
    let clock = Clock::start();
    let wanted = BiasMaps::parse(request)?;
    let mut folder = folder(request, "xsa-bias")?;
    let cells = wanted.rho.values.len() * wanted.self_attention.values.len();
    let progress = Progress::new("cells", (cells * wanted.lengths.len()) as u64, false, request.quiet);
    let mut maps = Vec::new();
    let mut text = format!("{:>8}  {:>12}  {:>12}  {:>24}\n", "tokens", "mean cos", "mean |error|", "largest |error|");
    for &tokens in &wanted.lengths {
        let mut rows = Rows::default();
        for &self_attention in &wanted.self_attention.values {
            let mut row = Vec::new();
            for &rho in &wanted.rho.values {
                let cell = Synthetic { tokens, rho, self_attention, ..wanted.cell.clone() };
                row.push(cell.measure_watched(&progress).map_err(input)?);
                progress.advance(1);
            }
            rows.0.push(row);
        }
        text += &rows.line(tokens, &wanted);
        maps.push(rows.map(tokens, &wanted));
    }
    drop(progress);
    let note = "cos is measured, the lines are the closed form at the measured a_ii and sum a_ij^2 and the given rho; \
                averages leave out position 0";
    let result =
        headed("xsa bias", wanted.spec(), json!(wanted.cell.seed), &clock, json!({"positions": note, "maps": maps}))?;
    let writing = writing_result();
    folder.write_document(&result)?;
    drop(writing);
    let files = illustrated(folder.path(), || figures::map(folder.path(), &folder.path().join("xsa-bias")));
    text += &format!("errors are of the closed form\n{}: result.json{files}\n", folder.path().display());
    print(request, &result, &text);
    Ok(0)
}

/// The cells of a map, row by row.
#[derive(Default)]
struct Rows(Vec<Vec<xsa::synthetic::Bias>>);

impl Rows {
    fn values(&self, of: impl Fn(&xsa::synthetic::Bias) -> f64) -> Vec<Vec<f64>> {
        self.0.iter().map(|row| row.iter().map(&of).collect()).collect()
    }

    fn map(&self, tokens: usize, wanted: &BiasMaps) -> Value {
        json!({
            "title": format!("{tokens} tokens"),
            "quantity": "cos(yᵢ, vᵢ)",
            "x": {"label": "ρ", "values": wanted.rho.values, "log": wanted.rho.log},
            "y": {"label": "self attention aᵢᵢ (aimed at)", "values": wanted.self_attention.values, "log": wanted.self_attention.log},
            "values": self.values(|b| b.cosine.mean),
            "contours": [0.2, 0.4, 0.6, 0.8, 0.9],
            "contours_of": self.values(|b| b.closed_form.mean),
            "contours_label": "lines: closed form",
            "standard_error": self.values(|b| b.cosine.standard_error),
            "self_attention": self.values(|b| b.self_attention.mean),
            "rho": self.values(|b| b.rho.mean),
            "closed_form_at_measured_rho": self.values(|b| b.closed_form_measured_rho.mean),
        })
    }

    fn line(&self, tokens: usize, wanted: &BiasMaps) -> String {
        let cells: Vec<(f64, f64)> =
            self.0.iter().flatten().map(|b| (b.cosine.mean, (b.cosine.mean - b.closed_form.mean).abs())).collect();
        let mean = |f: &dyn Fn(&(f64, f64)) -> f64| cells.iter().map(f).sum::<f64>() / cells.len() as f64;
        let worst = (0..cells.len()).max_by(|&a, &b| cells[a].1.total_cmp(&cells[b].1)).unwrap_or(0);
        let width = wanted.rho.values.len();
        format!(
            "{tokens:>8}  {:>12.4}  {:>12.4}  {:.4} at rho {:.2}, a {:.2}\n",
            mean(&|c| c.0),
            mean(&|c| c.1),
            cells[worst].1,
            wanted.rho.values[worst % width],
            wanted.self_attention.values[worst / width]
        )
    }
}

#[cfg(not(feature = "gguf"))]
fn measure(_: &Request) -> Result<u8, Error> {
    Err(Error::invalid(
        "model",
        "this program was built without the reader of GGUF files; build it with \"cargo build --release --features gguf\"",
    ))
}

#[cfg(feature = "gguf")]
use self::language_model::measure;

#[cfg(feature = "gguf")]
mod language_model {
    use headflow::json;
    use headflow::xsa::bias::{attended_rho, compare};
    use headflow::xsa::gguf::File;
    use headflow::xsa::llama::Likelihood;
    use headflow::xsa::tokenizer::Tokenizer;
    use headflow::xsa::{Llama, Measurement, Prediction};

    use std::io::Read;
    use std::path::Path;

    use headflow::model::text::cut;
    use ndarray::Array3;
    use statrs::statistics::{Data, OrderStatistics};

    use super::*;
    use crate::progress::Interruptible;

    /// Bins of positions, the same number for every factor of 2.
    const BINS_A_DOUBLING: f64 = 2.0;
    /// Heads that are named as missed most.
    const NAMED: usize = 5;

    const WHY: &str = "the model was not trained with XSA: its weights use what XSA removes, among it all that a token \
                       passes to itself through attention, so a rise of its perplexity is expected; this says nothing of models \
                       trained with it";
    const POSITIONS: &str =
        "averages leave out position 0, which sees only itself (y = v, cosine 1); rho is over all positions";

    /// The most bytes of a text or of a list of tokens: several times what the longest contexts hold.
    const MOST_BYTES: u64 = 1 << 24;
    /// The most characters of a model's name in print.
    const MOST_NAME: usize = 60;

    /// The text in a file.
    fn read(path: &str) -> Result<String, Error> {
        let failed = |e: &dyn std::fmt::Display| Error::unreadable(path, format!("cannot be read as text: {e}"));
        let mut bytes = Vec::new();
        let source = std::fs::File::open(path).map_err(|e| failed(&e))?;
        source.take(MOST_BYTES + 1).read_to_end(&mut bytes).map_err(|e| failed(&e))?;
        if bytes.len() as u64 > MOST_BYTES {
            return Err(Error::unreadable(
                path,
                format!("has more than {MOST_BYTES} bytes, which no context can hold"),
            ));
        }
        String::from_utf8(bytes).map_err(|e| failed(&e))
    }

    /// The token ids in a file: a list, or an object with one.
    fn token_list(path: &str) -> Result<Vec<u32>, Error> {
        let wrong =
            || Error::unreadable(path, "is not a list of token ids: [1, 2, ...], or an object whose \"tokens\" is one");
        let content: Value = json::parse(&read(path)?).map_err(|e| {
            // A repeated field is JSON all the same.
            Error::unreadable(path, if e.is_data() { e.to_string() } else { format!("is not JSON: {e}") })
        })?;
        let list = content.get("tokens").unwrap_or(&content).as_array().ok_or_else(wrong)?;
        list.iter().map(|v| v.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(wrong)).collect()
    }

    /// Bytes of memory that can still be had: of the machine, of the container, of the process's own limit.
    fn available_memory() -> u64 {
        let machine = sysinfo::System::new().map_or(u64::MAX, |mut system| {
            system.refresh_memory();
            let container = system.cgroup_limits().map_or(u64::MAX, |limits| limits.free_memory);
            system.available_memory().min(container)
        });
        // Linux alone tells of the third.
        let field = |path: &str, name: &str| {
            let text = std::fs::read_to_string(path).ok()?;
            let rest = text.lines().find_map(|line| line.strip_prefix(name))?.to_string();
            rest.split_whitespace().next()?.parse::<u64>().ok()
        };
        let used = field("/proc/self/status", "VmSize:").unwrap_or(0).saturating_mul(1024);
        let process =
            field("/proc/self/limits", "Max address space").map_or(u64::MAX, |most| most.saturating_sub(used));
        machine.min(process)
    }

    /// The tokens, where they come from, and what the tokenizer did.
    fn tokens(request: &Request, file: &File) -> Result<(Vec<u32>, Value, Value), Error> {
        match (request.xsa.get("text"), request.xsa.get("tokens")) {
            (Some(path), None) => {
                let text = read(path)?;
                if text.is_empty() {
                    return Err(Error::unreadable(path, "is empty: there is nothing to measure"));
                }
                let tokenizer = Tokenizer::read(file).map_err(input)?;
                let tokens = tokenizer.encode(&text).map_err(input)?;
                let used =
                    json!({"pre": tokenizer.kind(), "begin_token": tokenizer.begin(), "end_token": tokenizer.end()});
                Ok((tokens, json!({"text": path}), used))
            }
            (None, Some(path)) => {
                let tokens = token_list(path)?;
                if tokens.is_empty() {
                    return Err(Error::unreadable(path, "holds no token: there is nothing to measure"));
                }
                Ok((tokens, json!({"tokens": path}), Value::Null))
            }
            (Some(_), Some(_)) => Err(Error::invalid("tokens", "give --text or --tokens, not both")),
            (None, None) => Err(Error::invalid("text", "give --text FILE or --tokens FILE.json")),
        }
    }

    pub fn measure(request: &Request) -> Result<u8, Error> {
        let clock = Clock::start();
        let model = request.xsa.get("model").ok_or_else(|| Error::invalid("model", "give --model FILE.gguf"))?;
        let mut file = File::open(Path::new(model)).map_err(input)?;
        // Before the minutes that loading can take.
        let (ids, source, tokenizer) = tokens(request, &file)?;
        if ids.len() < 2 {
            return Err(Error::invalid(
                "text",
                "is a single token: averages leave out position 0, so give at least two",
            ));
        }
        Llama::check(&file, &ids, available_memory()).map_err(input)?;
        let mut folder = folder(request, "xsa-model")?;
        let go_on = |watch: &dyn Watch| {
            watch.advance(1);
            if watch.interrupted() { Err(xsa::Error::Interrupted) } else { Ok(()) }
        };
        let llama = Llama::read(&mut file, &mut |_, _| go_on(&Interruptible)).map_err(input)?;
        let loaded = clock.seconds();
        let progress = Progress::new("layers", 2 * llama.layers.len() as u64, false, request.quiet);
        let mut layers: Vec<Measurement> = Vec::new();
        let trained = llama
            .run(&ids, false, &mut |_, attention, shape, inputs| {
                layers.push(attention.measure_watched(shape, inputs, &progress)?);
                go_on(&progress)
            })
            .map_err(input)?;
        let exclusive = llama.run(&ids, true, &mut |_, _, _, _| go_on(&progress)).map_err(input)?;
        drop(progress);
        let name = file.text("general.name").unwrap_or("unnamed model").to_string();
        let spec = json!({"model": model, "source": source});
        let mut rest = values(&layers, &trained, &exclusive);
        let settings = &llama.settings;
        rest["title"] = json!(format!("{}, {} tokens", cut(&name, MOST_NAME), ids.len()));
        rest["model"] = json!({
            "name": name,
            "layers": llama.layers.len(),
            "heads": settings.heads,
            "key_value_heads": settings.key_value_heads,
            "head_size": settings.head_size,
            "vocabulary": settings.vocabulary,
            "context": settings.context,
        });
        rest["loading_seconds"] = json!(loaded);
        rest["tokenizer"] = tokenizer;
        rest["token_ids"] = json!(ids);
        let result = headed("xsa measure", spec, Value::Null, &clock, rest)?;
        let writing = writing_result();
        folder.write_arrays("positions.npz", &positions(&layers))?;
        folder.write_document(&result)?;
        drop(writing);
        let files = illustrated(folder.path(), || figures::xsa_model(folder.path(), &folder.path().join("xsa-model")));
        let text = summary(&result) + &format!("{}: result.json, positions.npz{files}\n", folder.path().display());
        print(request, &result, &text);
        Ok(0)
    }

    /// A quantity of every head and position.
    type Quantity = fn(&Measurement) -> &Vec<f64>;

    /// Every head at every position: `layers x heads x tokens`.
    fn positions(layers: &[Measurement]) -> Vec<(&'static str, Array3<f32>)> {
        let shape = layers[0].shape;
        let all: [(&str, Quantity); 8] = [
            ("cos", |m| &m.cosine),
            ("aii", |m| &m.self_attention),
            ("sum_a2", |m| &m.squared_attention),
            ("sink", |m| &m.first_attention),
            ("other", |m| &m.other),
            ("without_self", |m| &m.without_self),
            ("without_first", |m| &m.without_first),
            ("attended_similarity", |m| &m.attended_similarity),
        ];
        let array = |of: Quantity| {
            Array3::from_shape_fn((layers.len(), shape.heads, shape.tokens), |(layer, head, position)| {
                of(&layers[layer])[head * shape.tokens + position] as f32
            })
        };
        all.map(|(name, of)| (name, array(of))).into()
    }

    /// A number for every layer and head.
    fn heads(layers: &[Measurement], of: impl Fn(&Measurement, usize) -> f64) -> Vec<Vec<f64>> {
        layers.iter().map(|m| (0..m.shape.heads).map(|head| of(m, head)).collect()).collect()
    }

    fn mean(values: &[Vec<f64>]) -> f64 {
        let all = values.concat();
        all.iter().sum::<f64>() / all.len() as f64
    }

    fn values(layers: &[Measurement], trained: &Likelihood, exclusive: &Likelihood) -> Value {
        let cos = heads(layers, |m, head| m.mean(&m.cosine, head));
        let measured = cos.concat();
        let predictions: Vec<Value> = Prediction::ALL
            .iter()
            .map(|prediction| {
                let predicted = heads(layers, |m, head| prediction.of_head(m, head));
                let comparison = compare(&predicted.concat(), &measured);
                let width = cos[0].len();
                let worst: Vec<Value> = comparison
                    .worst
                    .iter()
                    .take(NAMED)
                    .map(|at| {
                        let (layer, head) = (at / width, at % width);
                        json!({"layer": layer, "head": head, "predicted": predicted[layer][head], "measured": cos[layer][head]})
                    })
                    .collect();
                json!({
                    "name": prediction.name(),
                    "correlation": comparison.correlation,
                    "mean_absolute_error": comparison.mean_absolute_error,
                    "mean_error": comparison.mean_error,
                    "worst": worst,
                    "cos": predicted,
                })
            })
            .collect();
        let arrays: Vec<(&str, Vec<Vec<f64>>)> = vec![
            ("cos", cos),
            ("aii", heads(layers, |m, head| m.mean(&m.self_attention, head))),
            ("sum_a2", heads(layers, |m, head| m.mean(&m.squared_attention, head))),
            ("sink", heads(layers, |m, head| m.mean(&m.first_attention, head))),
            ("removed", heads(layers, Measurement::removed)),
            ("rho", layers.iter().map(|m| m.rho.clone()).collect()),
            ("rho_without_first", layers.iter().map(|m| m.rho_without_first.clone()).collect()),
            ("attended_rho", heads(layers, attended_rho)),
            ("weighted_self", heads(layers, |m, head| m.mean(&m.weighted_self, head))),
            ("weighted_square", heads(layers, |m, head| m.mean(&m.weighted_square, head))),
            ("other", heads(layers, |m, head| m.mean(&m.other, head))),
            ("without_self", heads(layers, |m, head| m.mean(&m.without_self, head))),
            ("without_first", heads(layers, |m, head| m.mean(&m.without_first, head))),
            ("uniform", heads(layers, |m, head| m.mean(&m.uniform, m.shape.key_value_head(head)))),
        ];
        let mut document = json!({
            "positions": POSITIONS,
            "tokens": layers[0].shape.tokens,
            "mean_nll": trained.mean(),
            "perplexity": trained.perplexity(),
            "exclusive": {"mean_nll": exclusive.mean(), "perplexity": exclusive.perplexity(), "why": WHY},
            "overall": {},
            "by_position": by_position(layers),
            "predictions": predictions,
        });
        for (name, array) in arrays {
            document["overall"][name] = json!(mean(&array));
            document[name] = json!(array);
        }
        document
    }

    /// The cosine against the position, in bins: mean, and quartiles over layers and heads.
    fn by_position(layers: &[Measurement]) -> Value {
        let tokens = layers[0].shape.tokens;
        let bin = |i: usize| (BINS_A_DOUBLING * (i as f64).log2()).floor() as usize;
        let mut bins: Vec<(usize, usize)> = Vec::new();
        for i in 1..tokens {
            match bins.last_mut() {
                Some((first, end)) if bin(*first) == bin(i) => *end = i + 1,
                _ => bins.push((i, i + 1)),
            }
        }
        let mut columns = [const { Vec::new() }; 5];
        for &(first, end) in &bins {
            let over = |of: Quantity| {
                let mean = |row: &[f64]| row[first..end].iter().sum::<f64>() / (end - first) as f64;
                let of_layer = |m: &Measurement| of(m).chunks(tokens).map(mean).collect::<Vec<_>>();
                layers.iter().flat_map(of_layer).collect::<Vec<f64>>()
            };
            let mean = |all: &[f64]| all.iter().sum::<f64>() / all.len() as f64;
            let cos = over(|m| &m.cosine);
            let mut ordered = Data::new(cos.clone());
            // The middle on a logarithmic axis.
            let centre = ((first * (end - 1)) as f64).sqrt();
            let row =
                [centre, mean(&cos), ordered.lower_quartile(), ordered.upper_quartile(), mean(&over(|m| &m.other))];
            columns.iter_mut().zip(row).for_each(|(column, value)| column.push(value));
        }
        let [position, cos, lower, upper, other] = columns;
        let bounds: Vec<[usize; 2]> = bins.iter().map(|&(first, end)| [first, end - 1]).collect();
        json!({"bins": bounds, "position": position, "cos": cos, "lower": lower, "upper": upper, "other": other})
    }

    fn summary(result: &Value) -> String {
        let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
        let model = &result["model"];
        let added: String = ["begin", "end"]
            .into_iter()
            .map(|which| (which, &result["tokenizer"][format!("{which}_token")]))
            .filter(|(_, token)| token.is_u64())
            .map(|(which, token)| format!(", with the {which} token {token}"))
            .collect();
        let mut text = format!(
            "{}: {} layers x {} heads ({} key-value heads), {} tokens{added}; position 0 left out of averages\n",
            cut(model["name"].as_str().unwrap_or_default(), MOST_NAME),
            model["layers"],
            model["heads"],
            model["key_value_heads"],
            result["tokens"]
        );
        let rows = [
            ("cos", "cos(y, v), the bias"),
            ("removed", "fraction of |y|^2 that XSA removes"),
            ("aii", "attention to oneself, a_ii"),
            ("sum_a2", "sum_j a_ij^2"),
            ("sink", "attention to the first token"),
            ("rho", "correlation of values, rho"),
            ("other", "cos with the value of another position"),
            ("without_self", "cos without the self term"),
            ("without_first", "cos without the first token"),
            ("uniform", "cos under uniform attention"),
        ];
        for (name, what) in rows {
            text += &format!("  {what:<40} {:.4}\n", number(&result["overall"][name]));
        }
        text += &format!(
            "perplexity {:.3} (mean NLL {:.5}); with XSA switched on {:.3} ({:.5}):\n  {WHY}\n",
            number(&result["perplexity"]),
            number(&result["mean_nll"]),
            number(&result["exclusive"]["perplexity"]),
            number(&result["exclusive"]["mean_nll"])
        );
        text += &format!("{:<18} {:>6}  {:>12}  {}\n", "cos predicted by", "r", "mean |error|", "misses most");
        for prediction in result["predictions"].as_array().into_iter().flatten() {
            let worst: Vec<String> = prediction["worst"]
                .as_array()
                .into_iter()
                .flatten()
                .take(2)
                .map(|w| {
                    format!(
                        "layer {} head {} ({:.2}, is {:.2})",
                        w["layer"],
                        w["head"],
                        number(&w["predicted"]),
                        number(&w["measured"])
                    )
                })
                .collect();
            text += &format!(
                "{:<18} {:>6.3}  {:>12.4}  {}\n",
                prediction["name"].as_str().unwrap_or_default(),
                number(&prediction["correlation"]),
                number(&prediction["mean_absolute_error"]),
                worst.join(", ")
            );
        }
        text
    }
}
