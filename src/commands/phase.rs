//! `headflow phase`, and the figures `retrieval`, `heads`, `specialised`, `stages` and `activations`: one number over two
//! parameters, cell by cell, kept as it comes and resumable.

use std::path::{Path, PathBuf};

use headflow::cost;
use headflow::figures;
use headflow::folder::{CHECKPOINT, RunFolder};
use headflow::model::{Activation, Attention, Error, Task, Theta, larger, largest_size};
use headflow::phase::{
    Axis, Cells, Diagram, Measured, Quantity, cell as at, fill, holds, map_document, measure, saved, to_save,
};
use headflow::spec::{NAMES, Purpose, Reader, Spec, overlay};
use headflow::theory::bayes::best_bayes_risk;
use headflow::theory::floor::floor;
use headflow::theory::moments::{Coordinates, Evaluator, Watched};
use headflow::theory::quadrature::Quadrature;
use headflow::theory::settled::Settled;
use headflow::theory::stability::rate_along;
use nalgebra::DMatrix;
use serde_json::{Map, Value, json};

use super::{Clock, complain, folder, headed, illustrated, made, names, prepared, print};
use crate::cli::Request;
use crate::progress::{Interruptible, Progress, all_is_kept, interrupted, work_has_stopped, writing, writing_result};

/// What one cell computes: a spec and a quantity of it, or a number of its own.
type Cell = dyn Fn(usize, usize) -> Result<Measured, Error> + Sync;

/// One map of a diagram.
struct Panel {
    title: String,
    quantity: Quantity,
    /// The label of what is drawn, where it is not the quantity's.
    label: Option<&'static str>,
    x: Axis,
    y: Axis,
    /// Labels of the axes, where they are not the parameters'.
    labels: [Option<String>; 2],
    contours: Option<Vec<f64>>,
    boundaries: Vec<Value>,
    note: Option<String>,
    /// Whether its cells are read off flows, as the quantity says.
    reads_flows: bool,
    cell: Box<Cell>,
}

impl Panel {
    fn len(&self) -> usize {
        self.x.values.len() * self.y.values.len()
    }

    fn document(&self, cells: Cells) -> Value {
        let mut map = map_document(&self.title, self.quantity, &self.x, &self.y, &cells);
        let mut put = |name: &str, value: Value| map[name] = value;
        if let Some(label) = self.label {
            put("quantity", json!(label));
        }
        if let Some(contours) = &self.contours {
            put("contours", json!(contours));
        }
        if !self.boundaries.is_empty() {
            put("boundaries", json!(self.boundaries));
        }
        if let Some(note) = &self.note {
            put("note", json!(note));
        }
        for (axis, label) in ["x", "y"].into_iter().zip(&self.labels) {
            if let Some(label) = label {
                map[axis]["label"] = json!(label);
            }
        }
        map
    }
}

/// The values of all panels, one after the other.
fn split(panels: &[Panel], cells: &Cells) -> Vec<Cells> {
    let mut rest = &cells.0[..];
    panels
        .iter()
        .map(|panel| {
            let (own, others) = rest.split_at(panel.len());
            rest = others;
            Cells(own.to_vec())
        })
        .collect()
}

/// How a computation of panels ended.
enum End {
    Done(Cells),
    Interrupted,
}

/// Computes what is missing of the panels in `folder`, which keeps it under `request`.
fn compute(
    panels: &[Panel],
    request: &Value,
    folder: &mut RunFolder,
    from: Option<Cells>,
    quiet: bool,
    go_on: &str,
) -> Result<End, Error> {
    let count: usize = panels.iter().map(Panel::len).sum();
    let mut cells = from.unwrap_or_else(|| Cells::empty(count));
    if cells.0.len() != count {
        return Err(Error::unreadable(CHECKPOINT, format!("holds {} cells, not {count}", cells.0.len())));
    }
    let flows: Vec<bool> =
        panels.iter().flat_map(|panel| std::iter::repeat_n(panel.reads_flows, panel.len())).collect();
    cells.forget_untold(|index| flows[index]);
    let progress = Progress::new("cells", cells.missing() as u64, false, quiet);
    let cell = |mut index: usize| {
        for panel in panels {
            if index < panel.len() {
                let width = panel.x.values.len();
                return (panel.cell)(index % width, index / width);
            }
            index -= panel.len();
        }
        Err(Error::invalid("phase", "there is no such cell"))
    };
    let mut keep = |cells: &Cells| {
        let _writing = writing();
        folder.write_text(CHECKPOINT, &to_save(request, cells))?;
        if interrupted() {
            all_is_kept(go_on);
        }
        Ok(())
    };
    fill(&mut cells, &cell, &progress, &mut keep)?;
    drop(progress);
    if cells.missing() > 0 {
        return Ok(End::Interrupted);
    }
    Ok(End::Done(cells))
}

/// What an interrupted run says.
fn go_on(command: &str, folder: &Path) -> String {
    format!("interrupted; to go on: headflow {command} --resume {}", folder.display())
}

/// The folder of a run, and what a resumed one holds.
fn place(request: &Request, own: &Value, name: &str) -> Result<(RunFolder, Option<Cells>), Error> {
    match &request.resume {
        Some(folder) => {
            let checkpoint = folder.join(CHECKPOINT);
            saved(&checkpoint)?;
            // Ours before it is read for good: another process may be going on with it.
            let prepared = prepared(Some(folder), name, true)?;
            let (saved_request, cells) = saved(&checkpoint)?;
            if saved_request != *own {
                return Err(other_request(folder));
            }
            Ok((prepared, Some(cells)))
        }
        None => Ok((folder(request, name)?, None)),
    }
}

/// A checkpoint that does not hold what the command line asks for.
fn other_request(folder: &Path) -> Error {
    Error::unreadable(
        folder.join(CHECKPOINT).display().to_string(),
        "belongs to another request: resume it with the command line that began it, or with --resume alone",
    )
}

/// Says which cells failed.
fn failures(panels: &[Panel], all: &[Cells]) -> Vec<String> {
    panels
        .iter()
        .zip(all)
        .flat_map(|(panel, cells)| {
            let width = panel.x.values.len();
            cells
                .failed()
                .into_iter()
                .map(|(i, problem)| {
                    format!(
                        "{} = {}, {} = {}: {problem}",
                        panel.x.field,
                        panel.x.values[i % width],
                        panel.y.field,
                        panel.y.values[i / width]
                    )
                })
                .collect::<Vec<_>>()
        })
        .collect()
}

/// The cells whose flow had not settled, with how far it was from it.
fn unsettled(panels: &[Panel], all: &[Cells]) -> Vec<Value> {
    let of_panel = |(number, (panel, cells)): (usize, (&Panel, &Cells))| {
        let width = panel.x.values.len();
        let entry = |(i, settled): (usize, &Settled)| {
            json!({
                "map": number, "column": i % width, "row": i / width,
                "x": panel.x.values[i % width], "y": panel.y.values[i / width], "settled": settled,
            })
        };
        cells.unsettled().into_iter().map(entry).collect::<Vec<_>>()
    };
    panels.iter().zip(all).enumerate().flat_map(of_panel).collect()
}

/// What to say of them.
fn of_unsettled(panels: &[Panel], all: &[Cells], count: usize) -> String {
    let first = panels.iter().zip(all).find_map(|(panel, cells)| {
        let (i, settled) = *cells.unsettled().first()?;
        let width = panel.x.values.len();
        let (x, y) = (panel.x.values[i % width], panel.y.values[i / width]);
        Some(format!("{} = {x}, {} = {y}: {}", panel.x.field, panel.y.field, settled.describe()))
    });
    let Some(first) = first else { return String::new() };
    let number: usize = all.iter().map(|cells| cells.unsettled().len()).sum();
    format!(
        "{number} of {count} cells had not settled (hatched); use --until settled, or a larger --tau; the first at {first}\n"
    )
}

/// Draws into `out` with the stem `name`, from the result in `from`.
type Draw = fn(&Path, &Path) -> Result<Vec<PathBuf>, figures::Error>;

/// Computes panels into a folder, writes its result and draws it.
fn compute_and_draw(
    request: &Request,
    (spec, seed): (Map<String, Value>, u64),
    (command, name): (&str, &str),
    panels: &[Panel],
    own: &Value,
    rest: &dyn Fn(&[Cells]) -> Value,
    figure: Draw,
) -> Result<u8, Error> {
    let clock = Clock::start();
    let (mut folder, from) = place(request, own, name)?;
    let told = if command == "figure" { format!("figure {name}") } else { command.to_string() };
    let go_on = go_on(&told, folder.path());
    let all = match compute(panels, own, &mut folder, from, request.quiet || request.json, &go_on)? {
        End::Done(cells) => split(panels, &cells),
        End::Interrupted => {
            work_has_stopped();
            complain(&go_on);
            return Ok(130);
        }
    };
    let failed = failures(panels, &all);
    let mut values = rest(&all);
    if let Some(values) = values.as_object_mut() {
        values.insert("request".into(), own.clone());
        values.insert("failed".into(), json!(failed));
        if panels.iter().any(|panel| panel.reads_flows) {
            values.insert("unsettled".into(), json!(unsettled(panels, &all)));
        }
        if command == "figure" {
            values.insert("figure".into(), json!(name));
        }
    }
    let result = headed(command, Value::Object(spec), json!(seed), &clock, values)?;
    let writing = writing_result();
    folder.write_document(&result)?;
    folder.remove(CHECKPOINT)?;
    let path = folder.path().to_path_buf();
    drop(writing);
    let draw = || figure(&path, &path.join(name));
    // What has failed is one line, whatever it keeps from being drawn.
    let (files, undrawn) = match failed.is_empty() {
        true => (illustrated(&path, draw), String::new()),
        false => match draw() {
            Ok(files) => (format!(", {}", names(&path, &files)), String::new()),
            Err(error) => (String::new(), format!(" (and there is no figure: {error})")),
        },
    };
    let count: usize = panels.iter().map(Panel::len).sum();
    let text = format!(
        "{count} cells in {:.1} s ({:.1} ms each)\n{}{}: result.json{files}\n",
        clock.seconds(),
        1e3 * clock.seconds() / count as f64,
        of_unsettled(panels, &all, count),
        path.display()
    );
    print(request, &result, &text);
    if let Some(first) = failed.first() {
        complain(&format!("{} of {count} cells failed; the first at {first}{undrawn}", failed.len()));
        return Ok(2);
    }
    Ok(0)
}

/// `nu = sqrt(2 ln L)` where the axes are a signal of flips and the length: there the largest of `L` normals meets the
/// signal.
fn retrieval_line(spec: &Spec, x: &Axis, y: &Axis) -> Option<Value> {
    let Theta::Flip { nu } = &spec.theta else { return None };
    let signal = |axis: &Axis| match axis.field.as_str() {
        "theta.nu" => Some(1.0),
        "theta.scale" => Some(largest_size(nu)),
        _ => None,
    };
    let along = |lengths: &Axis, unit: f64, turned: bool| {
        let (first, last) = (lengths.values[0].max(2.0), lengths.values[lengths.values.len() - 1]);
        let points: Vec<[f64; 2]> = (0..=200)
            .map(|i| {
                let length = first * (last / first).powf(f64::from(i) / 200.0);
                let signal = (2.0 * length.ln()).sqrt() / unit;
                if turned { [length, signal] } else { [signal, length] }
            })
            .collect();
        json!({"label": "ν₁ = √(2 ln L)", "points": points})
    };
    match (signal(x), signal(y)) {
        (Some(unit), None) if y.field == "length" => Some(along(y, unit, false)),
        (None, Some(unit)) if x.field == "length" => Some(along(x, unit, true)),
        _ => None,
    }
}

/// The diagram that is asked for, or that a resumed folder holds.
fn wanted(request: &Request) -> Result<Diagram, Error> {
    let axis = |name: &str, text: &Option<String>| text.as_ref().map(|text| Axis::parse(name, text)).transpose();
    let quantity = request.quantity.as_deref().map(Quantity::parse).transpose()?;
    let (x, y) = (axis("x", &request.x)?, axis("y", &request.y)?);
    if let Some(folder) = &request.resume {
        let (own, _) = saved(&folder.join(CHECKPOINT))?;
        let diagram: Diagram = serde_json::from_value(own).map_err(|_| other_request(folder))?;
        if !diagram.has(quantity, [x.as_ref(), y.as_ref()], &request.fields) {
            return Err(other_request(folder));
        }
        return Ok(diagram);
    }
    let missing = |name: &str, example: &str| Error::invalid(name, format!("is missing: {example}"));
    Ok(Diagram {
        quantity: quantity.unwrap_or(Quantity::OptimalLoss),
        x: x.ok_or_else(|| missing("x", "the parameter across, like --x theta.nu=0.5:4:40"))?,
        y: y.ok_or_else(|| missing("y", "the parameter upwards, like --y length=log:10:1e6:20"))?,
        fields: request.fields.clone(),
    })
}

pub fn run(request: &Request) -> Result<u8, Error> {
    let diagram = wanted(request)?;
    let memory = request.memory;
    let common = if request.resume.is_some() { diagram.recorded(memory)? } else { diagram.check(memory)? };
    let spec = diagram.cell(0, 0)?;
    if request.print_spec {
        return super::print_fields(common);
    }
    let own = serde_json::to_value(&diagram).map_err(|e| Error::unreadable("phase", e))?;
    let Diagram { quantity, x, y, fields } = diagram.clone();
    let boundaries = retrieval_line(&Spec::from_map(&fields)?, &x, &y).into_iter().collect();
    let cell = move |i: usize, j: usize| measure(&diagram.cell(i, j)?, quantity, &Interruptible);
    let title = match quantity {
        Quantity::BayesRisk => "Bayes".to_string(),
        _ if [&x, &y].iter().any(|axis| axis.field == "heads") => spec.attention.name().to_string(),
        _ => format!("{}, H = {}", spec.attention.name(), spec.head_count()),
    };
    let panel = Panel {
        title,
        quantity,
        label: None,
        x,
        y,
        labels: [None, None],
        contours: (quantity == Quantity::GrowthRate).then(|| vec![0.0]),
        boundaries,
        note: None,
        reads_flows: quantity.of_a_flow(),
        cell: Box::new(cell),
    };
    let panels = [panel];
    let maps = |all: &[Cells]| json!({"maps": [panels[0].document(all[0].clone())]});
    compute_and_draw(request, (common, spec.seed), ("phase", "phase"), &panels, &own, &maps, figures::map)
}

/// The names of the figures that are phase diagrams.
pub const FIGURES: [&str; 5] = ["retrieval", "heads", "specialised", "stages", "activations"];

/// Draws one of [`FIGURES`], from results that exist or by computing them.
pub fn figure(request: &Request, name: &str) -> Result<u8, Error> {
    let clock = Clock::start();
    let draw: Draw = if name == "activations" { figures::lines } else { figures::map };
    if let Some(from) = &request.from {
        let out = request.out.clone().unwrap_or_else(|| from.clone());
        let _made = made(&out)?;
        let files = draw(from, &out.join(name)).map_err(super::figure::failed)?;
        super::figure::finish(request, &Spec::default(), &clock, &out, &files, json!({}))?;
        return Ok(0);
    }
    let reader = reader(name).ok_or_else(|| Error::invalid("figure", "is no phase diagram"))?;
    let fields = figure_fields(request, name, &reader)?;
    let own = json!({"figure": name, "fields": fields});
    let panels = match name {
        "retrieval" => retrieval(&fields)?,
        "heads" => heads(&fields)?,
        "specialised" => specialised(&fields)?,
        "stages" => second_stage()?,
        _ => activations(&fields)?,
    };
    let spec = Spec::recorded(&fields, reader)?;
    if request.print_spec {
        return super::print_spec(&spec);
    }
    cost::check(&spec, reader.purpose, request.memory)?;
    let maps = |all: &[Cells]| match name {
        "activations" => json!({"lines": of_activations(&panels, all)}),
        "stages" => json!({"maps": with_spectrum(&panels, all)}),
        _ => {
            let maps: Vec<Value> = panels.iter().zip(all).map(|(panel, cells)| panel.document(cells.clone())).collect();
            json!({"maps": maps})
        }
    };
    compute_and_draw(request, (spec.document()?, spec.seed), ("figure", name), &panels, &own, &maps, draw)
}

/// What a figure reads, and what it varies or has of its own.
pub fn reader(name: &str) -> Option<Reader> {
    let (quantity, figure, own): (_, _, &[&str]) = match name {
        "retrieval" => (Quantity::OptimalLoss, "retrieval", &["theta", "length", "attention", "bias", "aggregation"]),
        "heads" => (Quantity::Regret, "heads", &["theta", "heads", "attention", "bias", "aggregation"]),
        "specialised" => (Quantity::GrowthRate, "specialised", &["theta", "attention", "bias", "aggregation"]),
        "activations" => (Quantity::OptimalLoss, "activations", &["theta", "attention", "bias", "aggregation"]),
        // Rates at points that it finds by itself.
        "stages" => (Quantity::Stages, "stages", &NAMES),
        _ => return None,
    };
    Some(Reader { figure: Some(figure), own, ..Purpose::Phase(quantity).into() })
}

/// The fields of a figure: its defaults under what was given, or what a resumed folder holds.
fn figure_fields(request: &Request, name: &str, reader: &Reader) -> Result<Map<String, Value>, Error> {
    if let Some(folder) = &request.resume {
        let (own, _) = saved(&folder.join(CHECKPOINT))?;
        let Some(fields) = own["fields"].as_object().filter(|_| own["figure"] == name) else {
            return Err(other_request(folder));
        };
        if !holds(fields, &request.fields, reader.purpose) {
            return Err(other_request(folder));
        }
        return Ok(fields.clone());
    }
    let defaults = match name {
        "heads" => json!({"length": 5, "tolerance": 1e-4, "starts": 4}),
        "specialised" => json!({"length": 5, "heads": 2, "evaluator": "quadrature"}),
        "activations" => json!({"length": 6, "heads": 2, "starts": 4, "tolerance": 1e-8}),
        "stages" => json!({}),
        _ => json!({"heads": 2, "starts": 4, "tolerance": 1e-5}),
    };
    let mut fields = defaults.as_object().cloned().unwrap_or_default();
    // What is given and not read is refused here, once for all panels.
    Spec::over(fields.clone(), &request.fields, *reader)?;
    overlay(&mut fields, request.fields.clone(), reader.purpose);
    Ok(fields)
}

fn axis(field: &str, values: Vec<f64>, log: bool) -> Axis {
    Axis { field: field.into(), values, log }
}

fn evenly(from: f64, to: f64, count: usize) -> Vec<f64> {
    (0..count).map(|i| from + (to - from) * i as f64 / (count - 1) as f64).collect()
}

fn with(fields: &Map<String, Value>, more: Value) -> Map<String, Value> {
    let mut fields = fields.clone();
    if let Value::Object(more) = more {
        fields.extend(more);
    }
    fields
}

/// Bayes and optimal losses over `nu / sqrt(2 ln L)` and `log10 L`: flips, one feature, two heads.
fn retrieval(fields: &Map<String, Value>) -> Result<Vec<Panel>, Error> {
    let heads = fields.get("heads").and_then(Value::as_u64).unwrap_or(2);
    // One head for each sign is what bayes-softmax takes.
    let bayes = if heads < 2 { "Bayes".to_string() } else { format!("Bayes (and bayes-softmax, H = {heads})") };
    let cases = [(None, &*bayes), (Some(Activation::Softmax), "softmax"), (Some(Activation::Softmax1), "softmax1")];
    cases
        .into_iter()
        .map(|(activation, title)| {
            let (x, y) = (axis("ratio", evenly(0.4, 2.0, 17), false), axis("log10 length", evenly(1.0, 9.0, 9), false));
            let quantity = if activation.is_some() { Quantity::OptimalLoss } else { Quantity::BayesRisk };
            let attention = activation.unwrap_or(Activation::BayesSoftmax).name();
            let fields = with(fields, json!({"theta": {"kind": "flip", "nu": [1.0]}, "attention": attention}));
            let (ratios, lengths) = (x.values.clone(), y.values.clone());
            let cell = move |i: usize, j: usize| {
                let length = 10f64.powf(lengths[j]).round();
                let signal = ratios[i] * (2.0 * length.ln()).sqrt();
                let spec = at(&fields, quantity, &[("length", length), ("theta.nu", signal)])?;
                measure(&spec, quantity, &Interruptible)
            };
            Ok(Panel {
                title: title.into(),
                quantity,
                label: Some("loss"),
                x,
                y,
                labels: [Some("ν / √(2 ln L)".into()), Some("log₁₀ L".into())],
                contours: Some(vec![0.1, 0.3, 0.5, 0.7, 0.9]),
                boundaries: vec![json!({"label": "ν = √(2 ln L)", "points": [[1.0, 1.0], [1.0, 9.0]]})],
                note: None,
                reads_flows: false,
                cell: Box::new(cell),
            })
        })
        .collect()
}

/// Regret over `nu` and `H` for the three activations, two flips: one head for each support point.
fn heads(fields: &Map<String, Value>) -> Result<Vec<Panel>, Error> {
    Activation::ALL
        .into_iter()
        .map(|activation| {
            let fields =
                with(fields, json!({"theta": {"kind": "flip", "nu": [1.0, 1.0]}, "attention": activation.name()}));
            let (x, y) = (axis("theta.nu", evenly(0.5, 4.0, 8), false), axis("heads", evenly(1.0, 5.0, 5), false));
            let (signals, counts) = (x.values.clone(), y.values.clone());
            let cell = move |i: usize, j: usize| {
                let values = [("theta.nu", signals[i]), ("heads", counts[j])];
                let regret = measure(&at(&fields, Quantity::Regret, &values)?, Quantity::Regret, &Interruptible)?.value;
                Ok(larger(regret, 0.0).into())
            };
            Ok(Panel {
                title: activation.name().into(),
                quantity: Quantity::Regret,
                label: None,
                x,
                y,
                labels: [Some("ν₁ = ν₂ = ν".into()), None],
                contours: Some(vec![0.01, 0.05, 0.1, 0.2, 0.3]),
                boundaries: vec![json!({"label": "H = |supp θ| = 4", "points": [[0.0, 4.0], [5.0, 4.0]]})],
                note: None,
                reads_flows: false,
                cell: Box::new(cell),
            })
        })
        .collect()
}

/// The largest specialising rate at the unspecialised point over mean and spread of a Gaussian theta.
fn specialised(fields: &Map<String, Value>) -> Result<Vec<Panel>, Error> {
    Activation::ALL
        .into_iter()
        .map(|activation| {
            let theta = json!({"kind": "gaussian", "mean": [0.0], "sd": [1.0]});
            let fields = with(fields, json!({"theta": theta, "attention": activation.name()}));
            let (x, y) =
                (axis("theta.mean", evenly(0.0, 3.0, 16), false), axis("theta.sd", evenly(0.2, 3.0, 15), false));
            let (means, spreads) = (x.values.clone(), y.values.clone());
            let cell = move |i: usize, j: usize| {
                let values = [("theta.mean", means[i]), ("theta.sd", spreads[j])];
                measure(&at(&fields, Quantity::GrowthRate, &values)?, Quantity::GrowthRate, &Interruptible)
            };
            Ok(Panel {
                title: activation.name().into(),
                quantity: Quantity::GrowthRate,
                label: None,
                x,
                y,
                labels: [Some("mean of θ".into()), Some("standard deviation of θ".into())],
                contours: Some(vec![0.0, 0.01, 0.1, 0.3]),
                boundaries: Vec::new(),
                note: Some("stable where κ < 0".into()),
                reads_flows: false,
                cell: Box::new(cell),
            })
        })
        .collect()
}

/// The rate at which pairs of softmax heads at `+-s1` split along the second feature, over the signal and `L`.
fn second_stage() -> Result<Vec<Panel>, Error> {
    [0.8, 1.0]
        .into_iter()
        .map(|ratio| {
            let (x, y) = (axis("theta.nu", evenly(1.0, 4.5, 29), false), axis("length", lengths(), true));
            let (signals, lengths) = (x.values.clone(), y.values.clone());
            let cell = move |i: usize, j: usize| split_rate(lengths[j] as usize, signals[i], ratio).map(Measured::from);
            Ok(Panel {
                title: format!("softmax, H = 4, flips, ν₂ = {ratio} ν₁"),
                quantity: Quantity::Stages,
                label: Some("second stage exists"),
                x,
                y,
                labels: [Some("ν₁".into()), Some("L".into())],
                contours: None,
                boundaries: Vec::new(),
                note: None,
                reads_flows: false,
                cell: Box::new(cell),
            })
        })
        .collect()
}

fn lengths() -> Vec<f64> {
    vec![3.0, 4.0, 5.0, 7.0, 10.0, 14.0, 20.0, 30.0, 45.0, 65.0, 100.0, 150.0, 220.0, 330.0, 500.0, 700.0, 1000.0]
}

/// `L` times the growth rate along the second feature where two heads lie at `+kappa s1` and two at `-kappa s1`, stationary
/// for gradient flow.
fn split_rate(length: usize, signal: f64, ratio: f64) -> Result<f64, Error> {
    let attention = Attention::from(Activation::Softmax);
    // Pairs of equal heads have the loss of single ones.
    let one = Task::new(length, Theta::Flip { nu: vec![signal] })?;
    let pair = Quadrature::new(&one, 2, attention, 1e-8)?;
    let pair = Watched::new(&pair, &Interruptible);
    // The descent that the flow makes from small keys, in one coordinate.
    let slope = |kappa: f64| -> Result<f64, Error> {
        let at = Coordinates {
            m: DMatrix::from_row_slice(2, 1, &[kappa, -kappa]),
            c: DMatrix::zeros(2, 2),
            b: vec![0.0; 2],
        };
        Ok(pair.moments(&at).gx[(0, 0)])
    };
    let (mut low, mut high) = (0.05, 0.1);
    while slope(high)? < 0.0 {
        (low, high) = (high, high * 1.3);
        if interrupted() {
            return Err(Error::interrupted("stages"));
        }
        if high > 40.0 {
            return Err(Error::invalid("stages", format!("no plateau at L = {length}, nu = {signal}")));
        }
    }
    while high - low > 1e-6 * high {
        let middle = 0.5 * (low + high);
        if slope(middle)? < 0.0 { low = middle } else { high = middle }
    }
    let kappa = 0.5 * (low + high);
    let task = Task::new(length, Theta::Flip { nu: vec![signal, ratio * signal] })?;
    let quadrature = Quadrature::new(&task, 4, attention, 1e-8)?;
    let m = DMatrix::from_row_slice(4, 2, &[kappa, 0.0, kappa, 0.0, -kappa, 0.0, -kappa, 0.0]);
    let at = Coordinates { m, c: DMatrix::zeros(4, 4), b: vec![0.0; 4] };
    let split = DMatrix::from_row_slice(4, 2, &[0.0, 1.0, 0.0, -1.0, 0.0, 1.0, 0.0, -1.0]);
    Ok(rate_along(&Watched::new(&quadrature, &Interruptible), &at, &split) * length as f64)
}

/// The maps of `stages`: whether the rate is positive, with its zero in each row, and `sqrt(2 ln L)`.
fn with_spectrum(panels: &[Panel], all: &[Cells]) -> Vec<Value> {
    panels
        .iter()
        .zip(all)
        .map(|(panel, cells)| {
            let rows = cells.rows(panel.x.values.len());
            let spectrum: Vec<[f64; 2]> = rows
                .iter()
                .zip(&panel.y.values)
                .filter_map(|(row, &length)| Some([zero_of(&panel.x.values, row)?, length]))
                .collect();
            let exists = Cells(
                cells
                    .0
                    .iter()
                    .map(|c| c.clone().map(|r| r.map(|rate| f64::from(u8::from(rate.value > 0.0)).into())))
                    .collect(),
            );
            let mut map = panel.document(exists);
            map["names"] = json!(["no", "yes"]);
            map["rates"] = json!(rows);
            let retrieval: Vec<[f64; 2]> =
                panel.y.values.iter().map(|&length| [(2.0 * f64::ln(length)).sqrt(), length]).collect();
            map["boundaries"] = json!([
                {"label": "rate of the second stage is 0 (spectrum)", "points": spectrum},
                {"label": "ν₁ = √(2 ln L)", "points": retrieval},
            ]);
            map
        })
        .collect()
}

/// Where a row of values first changes its sign, linearly between its points.
fn zero_of(x: &[f64], row: &[Option<f64>]) -> Option<f64> {
    row.windows(2).zip(x.windows(2)).find_map(|(v, x)| match (v[0], v[1]) {
        (Some(a), Some(b)) if (a < 0.0) != (b < 0.0) => Some(x[0] - a * (x[1] - x[0]) / (b - a)),
        _ => None,
    })
}

/// Signals of the figure `activations`.
fn signals() -> Vec<f64> {
    vec![0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 10.0, 14.0, 20.0]
}

/// Rows: the three activations, the Bayes risk, softmax's floor.
fn activations(fields: &Map<String, Value>) -> Result<Vec<Panel>, Error> {
    let (x, y) = (axis("theta.nu", signals(), true), axis("row", evenly(0.0, 4.0, 5), false));
    let values = x.values.clone();
    let fields = with(fields, json!({"theta": {"kind": "flip", "nu": [1.0]}}));
    let cell = move |i: usize, j: usize| {
        let signal = [("theta.nu", values[i])];
        if let Some(activation) = Activation::ALL.get(j) {
            let fields = with(&fields, json!({"attention": activation.name()}));
            let spec = at(&fields, Quantity::OptimalLoss, &signal)?;
            return Ok(larger(measure(&spec, Quantity::OptimalLoss, &Interruptible)?.value, 0.0).into());
        }
        let spec = at(&with(&fields, json!({"attention": "softmax"})), Quantity::OptimalLoss, &signal)?;
        let task = spec.task()?;
        let risk = larger(best_bayes_risk(&task, 1e-12)?.risk, 0.0);
        let floor = || floor(&task, spec.head_count(), &Attention::from(Activation::Softmax), risk);
        Ok(if j == 3 { risk } else { floor() }.into())
    };
    Ok(vec![Panel {
        title: "optimal losses".into(),
        quantity: Quantity::OptimalLoss,
        label: None,
        x,
        y,
        labels: [None, None],
        contours: None,
        boundaries: Vec::new(),
        note: None,
        reads_flows: false,
        cell: Box::new(cell),
    }])
}

/// Losses below this are rounding.
const SMALLEST_LOSS: f64 = 1e-11;

fn of_activations(panels: &[Panel], all: &[Cells]) -> Vec<Value> {
    let (x, rows) = (&panels[0].x.values, all[0].rows(panels[0].x.values.len()));
    let labels = ["softmax", "softmax1", "bayes-softmax", "Bayes risk", "floor of softmax"];
    let curves: Vec<Value> = rows
        .iter()
        .zip(labels)
        .enumerate()
        .map(|(k, (row, label))| {
            let points: Vec<Value> = x
                .iter()
                .zip(row)
                .map(|(x, y)| json!([x, y.filter(|y| *y >= SMALLEST_LOSS)]))
                .filter(|point| !point[1].is_null())
                .collect();
            json!({"label": label, "points": points, "style": if k < 3 { "line" } else { "dashed" }})
        })
        .collect();
    vec![json!({
        "title": "flips, F = 1, H = 2", "x": {"label": "ν", "log": true},
        "y": {"label": "optimal loss E*", "log": true}, "curves": curves, "table": rows,
    })]
}
