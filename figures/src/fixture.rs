//! Result folders with made-up but realistic numbers, and checks of the figures drawn from them.

use std::fs;
use std::path::{Path, PathBuf};

use headflow_model::series::{Series, write_csv};
use headflow_model::{Activation, Estimate, Quantity, Shape, Trajectory};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Which routes a folder holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Routes {
    All,
    Theory,
    TheoryPerDimension,
    Direct,
    /// Theory, direct SGD and the overlap chain.
    AllEngines,
    /// The overlap chain alone.
    Overlap,
    TheoryAndOverlap,
    /// Theory, and one replica of the overlap chain without a mean.
    TheoryAndReplica,
    /// All, with the same number everywhere.
    Constant,
}

/// A result folder that is removed in the end.
pub struct Fixture {
    folder: TempDir,
}

/// Uniform on (-1, 1): Weyl's sequence, hashed.
fn noise(counter: &mut u64) -> f64 {
    *counter = counter.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (*counter ^ (*counter >> 31)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    ((mixed ^ (mixed >> 29)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

/// Heads that take the signs of the first feature by `tau = 40`, of the second by `tau = 200` and
/// of the third by `tau = 320`.
fn path(shape: Shape, times: usize, delay: f64, speed: f64, size: f64, counter: &mut u64) -> Trajectory {
    let logistic = |x: f64| 1.0 / (1.0 + (-x).exp());
    let mut trajectory = Trajectory::new(shape);
    let mut wander = vec![0.0; shape.heads * shape.features];
    for t in 0..times {
        let time = 400.0 * t as f64 / (times.max(2) - 1) as f64;
        wander.iter_mut().for_each(|w| *w = 0.8 * *w + size * noise(counter));
        let m = |head: usize, feature: usize| {
            let odd = [head, head >> 1, head ^ head >> 1][feature % 3] & 1;
            let sign = if odd == 0 { 1.0 } else { -1.0 };
            let (middle, rate) = [(25.0, 0.25), (190.0, 0.06), (310.0, 0.12)][feature % 3];
            sign * (1.5 - 0.4 * feature as f64 - 0.05 * head as f64) * logistic((time - middle - delay) * rate * speed)
                + wander[head * shape.features + feature]
        };
        let grown = (0..shape.features).map(|f| m(0, f).abs()).sum::<f64>() / 2.6;
        let row = shape.quantities().map(|quantity| match quantity {
            Quantity::Loss => 1.0 - 1.0 / 16.0 - 0.55 * grown + 0.02 * wander[0],
            Quantity::Alignment { head, feature } => m(head, feature),
            Quantity::Overlap { head, other } => {
                (0..shape.features).map(|f| m(head, f) * m(other, f)).sum::<f64>()
                    + if head == other { 0.05 } else { 0.0 }
            }
            Quantity::Bias { head } => -0.1 * head as f64,
        });
        trajectory.rows.push(row.collect());
        trajectory.times.push(time);
    }
    trajectory
}

impl Fixture {
    /// Four heads, two features.
    pub fn new(attention: Activation, routes: Routes, times: usize) -> Self {
        Self::with_shape(attention, routes, times, 4, 2)
    }

    /// A folder with its two files.
    pub fn with_shape(attention: Activation, routes: Routes, times: usize, heads: usize, features: usize) -> Self {
        let shape = Shape { heads, features };
        let counter = &mut (attention as u64 + 1);
        let speed = [0.7, 1.0, 1.3][attention as usize];
        let mut series = Vec::new();
        let mut theory =
            |name: &str, delay: f64| Series::of_trajectory(name, &path(shape, times, delay, speed, 0.0, counter));
        match routes {
            Routes::Direct | Routes::Overlap => {}
            Routes::TheoryPerDimension => {
                series.extend([theory("theory D=500", 8.0), theory("theory D=1000", 0.0)]);
            }
            _ => series.push(theory("theory", 0.0)),
        }
        let engines: &[&str] = match routes {
            Routes::Theory => &[],
            Routes::AllEngines => &["direct", "overlap"],
            Routes::Overlap | Routes::TheoryAndOverlap | Routes::TheoryAndReplica => &["overlap"],
            _ => &["direct"],
        };
        for engine in engines {
            for (dimension, delay) in [(500, 8.0), (1000, 0.0)] {
                let replicas: Vec<_> =
                    (0..8).map(|_| path(shape, times, delay, speed, 100.0 / dimension as f64, counter)).collect();
                let estimate = Estimate::over(&replicas).unwrap();
                let trace = Estimate::trace_over(&replicas);
                series.push(Series::of_estimate(format!("{engine} D={dimension}"), &estimate, &trace));
                for (k, replica) in replicas.iter().enumerate() {
                    series.push(Series::of_trajectory(format!("{engine} D={dimension} replica={k}"), replica));
                }
            }
        }
        if routes == Routes::TheoryAndReplica {
            series.retain(|s| s.route == "theory" || s.route == "overlap D=1000 replica=0");
        }
        if routes == Routes::Constant {
            for series in &mut series {
                series.values.rows.iter_mut().flatten().for_each(|v| *v = 0.25);
                series.trace.fill((0.25, 0.0));
                series.errors = None;
            }
        }
        let folder = tempfile::tempdir().unwrap();
        write_csv(&series, fs::File::create(folder.path().join("series.csv")).unwrap()).unwrap();
        let nu: Vec<_> = (0..features).map(|f| 1.5 - 0.5 * f as f64).collect();
        let name = attention.name();
        let header = format!(
            "{{\"format\":\"headflow-result\",\"command\":\"compare\",\"version\":\"0.1.0\",\"seed\":7,\"spec\":\
             {{\"length\":16,\"heads\":{heads},\"theta\":{{\"kind\":\"flip\",\"nu\":{nu:?}}},\"attention\":\"{name}\",\
             \"gamma\":0.1,\"batch\":1,\"other\":[]}}}}"
        );
        fs::write(folder.path().join("result.json"), header).unwrap();
        Self { folder }
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Sets a field of `result.json`.
    pub fn add(&self, name: &str, value: Value) {
        let path = self.path().join("result.json");
        let mut document: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        document[name] = value;
        fs::write(path, document.to_string()).unwrap();
    }

    /// The field `stages` for three features, of the theory and of a replica.
    pub fn stages(heads: usize) -> Value {
        let sign = |odd: usize| if odd & 1 == 0 { "+" } else { "-" };
        let patterns = |learned: usize| -> Vec<String> {
            let of_head = |head: usize| {
                let signs = [head, head >> 1, head ^ head >> 1].into_iter().zip(1..).take(learned);
                let pattern: String = signs.map(|(odd, s)| format!("{}s{s}", sign(odd))).collect();
                if pattern.is_empty() { "off".into() } else { pattern }
            };
            (0..heads).map(of_head).collect()
        };
        let plateau = |start: f64, end: Option<f64>, loss: f64, learned: usize| json!({"start": start, "end": end, "loss": loss, "patterns": patterns(learned)});
        json!([
            {
                "route": "theory",
                "plateaus": [
                    plateau(0.0, Some(12.0), 0.93, 0),
                    plateau(48.0, Some(140.0), 0.62, 1),
                    plateau(245.0, Some(285.0), 0.4, 2),
                    plateau(350.0, None, 0.25, 3),
                ],
                "order": [{"feature": 0, "time": 25.0}, {"feature": 1, "time": 190.0}, {"feature": 2, "time": 310.0}],
                "excursions": [{"head": 0, "start": 60.0, "end": 95.0, "pattern": "+s2"}],
            },
            {
                "route": "overlap D=1000 replica=0",
                "order": [{"feature": 0, "time": 27.0}, {"feature": 1, "time": 184.0}, {"feature": 2, "time": null}],
            },
        ])
    }

    /// Replaces values by NaN where `when(time, quantity)`.
    pub fn spoil(&self, when: impl Fn(f64, &str) -> bool) {
        let path = self.path().join("series.csv");
        let text = fs::read_to_string(&path).unwrap();
        let mut lines = text.lines();
        let mut spoilt = format!("{}\n", lines.next().unwrap());
        for line in lines {
            let mut cells: Vec<_> = line.split(',').collect();
            if when(cells[1].parse().unwrap(), cells[2]) {
                cells[5] = "NaN";
            }
            spoilt += &format!("{}\n", cells.join(","));
        }
        fs::write(path, spoilt).unwrap();
    }
}

/// A figure of a result folder, to the files of a stem.
type Draw = fn(&Path, &Path) -> Result<Vec<PathBuf>, crate::Error>;

/// Draws a folder that holds this document alone; the folder, and what came of it.
pub fn draw_document(document: &Value, figure: Draw) -> (TempDir, Result<Vec<PathBuf>, crate::Error>) {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("result.json"), document.to_string()).unwrap();
    let files = figure(folder.path(), &folder.path().join("figure"));
    (folder, files)
}

/// Checks that a PNG and an SVG are there and not blank, and which texts the SVG holds. With
/// `HEADFLOW_FIGURES` set to a folder, copies them there to be looked at.
pub fn assert_drawn(files: &[PathBuf], present: &[&str], absent: &[&str]) {
    assert_drawn_with(files, 10_000, present, absent);
}

/// The same for a figure of few panels and words.
pub fn assert_drawn_in_few_strokes(files: &[PathBuf], present: &[&str], absent: &[&str]) {
    assert_drawn_with(files, 6_000, present, absent);
}

fn assert_drawn_with(files: &[PathBuf], ink: usize, present: &[&str], absent: &[&str]) {
    let [png, svg] = files else { panic!("{files:?}") };
    if let Some(folder) = std::env::var_os("HEADFLOW_FIGURES") {
        let test = std::thread::current().name().unwrap().replace("::", "-");
        let stem = png.file_stem().unwrap().display().to_string();
        for file in files {
            let name = format!("{test}-{stem}.{}", file.extension().unwrap().display());
            fs::copy(file, Path::new(&folder).join(name)).unwrap();
        }
    }
    let image = image::open(png).unwrap().to_rgb8();
    assert!(image.width() >= 1600 && image.height() > 600);
    // Saturated pixels are the heads' colours; dark ones the text and the axes.
    let count = |wanted: &dyn Fn(u8, u8) -> bool| {
        // Not the legend.
        let pixels = image.pixels().take((image.width() * (image.height() - 160)) as usize);
        pixels.filter(|p| wanted(*p.0.iter().min().unwrap(), *p.0.iter().max().unwrap())).count()
    };
    assert!(count(&|low, high| high - low > 80) > 100, "no coloured curves in {png:?}");
    assert!(count(&|_, high| high < 80) > ink, "no text or axes in {png:?}");
    let colors: std::collections::HashSet<_> = image.pixels().collect();
    assert!(colors.len() > 100, "{} colours", colors.len());

    let text = fs::read_to_string(svg).unwrap();
    assert!(text.starts_with("<svg ") && text.trim_end().ends_with("</svg>"));
    assert!(text.contains(&format!("<svg width=\"{}\" height=\"{}\" ", image.width(), image.height())));
    for label in present {
        assert!(text.contains(label), "{label} is not in {svg:?}");
    }
    for label in absent {
        assert!(!text.contains(label), "{label} is in {svg:?}");
    }
}
