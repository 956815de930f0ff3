//! Random calls: mostly small and ordinary, so that they reach deep code, with a few fields that are extreme (an ordinary
//! word for a number far away) or absurd (no value at all).

use serde_json::{Value, json};

use crate::call::Call;
use crate::draw::Draw;

/// Numbers far from the ordinary.
const FAR: &[&str] = &[
    "0",
    "-0",
    "5e-324",
    "1e-300",
    "1e-100",
    "1e-30",
    "1e-16",
    "1e-13",
    "1e-9",
    "1e-3",
    "0.5",
    "1",
    "-1",
    "2",
    "50",
    "1e3",
    "1e6",
    "1e9",
    "1e16",
    "1e20",
    "1e100",
    "1e154",
    "1e300",
    "1.7976931348623157e308",
    "-1e-300",
    "-1e300",
];

/// Whole numbers far from the ordinary.
const FAR_COUNTS: &[&str] = &[
    "0",
    "1",
    "2",
    "3",
    "63",
    "64",
    "65",
    "128",
    "1023",
    "1024",
    "1025",
    "32768",
    "65536",
    "131072",
    "1000000",
    "16777216",
    "1000000000",
    "2147483648",
    "4294967295",
    "4294967296",
    "1000000000000",
    "9007199254740993",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
];

/// Words that are no number, or hardly.
const ABSURD: &[&str] = &[
    "nan",
    "NaN",
    "inf",
    "-inf",
    "1e999",
    "-1e999",
    "",
    " ",
    "abc",
    "0x10",
    "1,2",
    "1;2",
    "1,,2",
    "--",
    "1e",
    "½",
    "1_000",
    "null",
    "true",
    "{}",
    "[",
    "[[[[1]]]]",
    "\n",
    "1\n2",
    "-1",
    "1.5",
    "+3",
    "18446744073709551616",
    "999999999999999999999999999999999999999999",
    "0.00000000000000000000000000000000000000000001",
];

/// Files by name, with what they hold.
type Files = Vec<(String, Vec<u8>)>;

/// Results that were made beforehand: calls read them, whole or spoilt.
pub struct Material {
    /// Folders with all their files.
    pub results: Vec<(String, Files)>,
}

struct Maker<'a> {
    draw: &'a mut Draw,
    call: Call,
    /// How often a field is not ordinary.
    odd: f64,
    length: usize,
    heads: usize,
    features: usize,
    softmax1: bool,
    trained: bool,
}

/// The call of a stream.
pub fn call(draw: &mut Draw, material: &Material) -> Call {
    let odd = draw.pick(&[0.0, 0.04, 0.04, 0.1, 0.1, 0.25]);
    let mut maker =
        Maker { draw, call: Call::default(), odd, length: 6, heads: 4, features: 2, softmax1: false, trained: false };
    maker.make(material);
    let mut call = maker.call;
    if draw.chance(0.9) && !call.flag("--print-spec") {
        call.flags.push(vec!["--json".into()]);
    }
    if draw.chance(0.2) {
        let count = if draw.chance(0.03) { draw.pick(ABSURD) } else { draw.pick(&["1", "1", "2", "3", "3"]) };
        call.flags.push(vec!["--threads".into(), count.into()]);
    }
    if draw.chance(0.02) {
        let memory =
            if draw.chance(0.3) { draw.pick(ABSURD) } else { draw.pick(&["0", "1e-300", "0.001", "1", "1.5"]) };
        call.flags.push(vec!["--memory".into(), memory.into()]);
    }
    if draw.chance(0.03) && !call.is("doctor") {
        let folder = draw.pick(&["out", "a/b/c", "", ".", "spec.json", "/dev/null", "/proc/none", "out\nput", "ö"]);
        call.flags.push(vec!["--out".into(), folder.into()]);
    }
    if draw.chance(0.15) {
        to_file(draw, &mut call);
    }
    call
}

impl Maker<'_> {
    fn make(&mut self, material: &Material) {
        let command = self.draw.pick(&[
            "loss",
            "loss",
            "loss",
            "bayes",
            "bayes",
            "optimum",
            "optimum",
            "flow",
            "flow",
            "flow",
            "simulate",
            "simulate",
            "compare",
            "stability",
            "stability",
            "stages",
            "stages",
            "prune",
            "prune",
            "phase",
            "phase",
            "xsa",
            "figure",
            "from",
            "doctor",
        ]);
        self.call.command = vec![command.to_string()];
        match command {
            "loss" => self.loss(),
            "bayes" => {
                self.task();
                self.maybe(0.2, "tolerance", |m| m.tolerance());
                self.maybe(0.1, "heads", |m| m.heads.to_string());
            }
            "optimum" => {
                self.task();
                self.attention();
                self.heads_for_a_search();
                self.search();
            }
            "flow" => {
                self.start(true);
                self.flow();
                self.maybe(0.1, "stop_loss", |m| m.number(0.0, 1.0));
                self.maybe(0.1, "stop_alignment", |m| {
                    let (head, feature) = (m.draw.count(0, m.heads), m.draw.count(0, m.features));
                    format!("{head},{feature},{}", m.number(-1.0, 1.0))
                });
            }
            "simulate" => {
                let random = self.draw.chance(0.4);
                self.start(!random);
                self.simulation(random);
                let chain = self.draw.chance(0.5);
                self.engine(if chain { "overlap" } else { "direct" });
                let least = self.heads + self.features + if chain { self.length } else { 0 };
                self.put("dimension", |m| m.count(least, least + 40));
            }
            "compare" => {
                let random = self.draw.chance(0.4);
                self.start(!random);
                self.simulation(random);
                self.points();
                let least = self.heads + self.features + self.length;
                self.put("dimensions", |m| format!("{},{}", m.count(least, least + 20), m.count(least, least + 60)));
                self.maybe(0.3, "engine", |m| m.draw.pick(&["direct", "overlap", "both"]).into());
            }
            "stability" => self.stability(),
            "stages" => self.stages(),
            "prune" => self.prune(),
            "phase" => self.phase(),
            "xsa" => self.exclusive(),
            "figure" => self.figure(),
            "from" => self.from(material),
            _ => {}
        }
    }

    /// A flag with an ordinary value, or one that is not.
    fn put(&mut self, name: &str, ordinary: impl FnOnce(&mut Self) -> String) {
        let value = self.value(ordinary);
        self.flag(name, value);
    }

    fn value(&mut self, ordinary: impl FnOnce(&mut Self) -> String) -> String {
        let ordinary = ordinary(self);
        if !self.draw.chance(self.odd) {
            return ordinary;
        }
        if self.draw.chance(0.2) {
            return self.draw.pick(ABSURD).into();
        }
        self.far(&ordinary)
    }

    /// The text with one of its numbers, or all of them, far from the ordinary.
    fn far(&mut self, text: &str) -> String {
        let is_separator = |c: char| ",;:=[]".contains(c);
        let is_number = |word: &str| word.parse::<f64>().is_ok();
        let count = text.split(is_separator).filter(|w| is_number(w)).count();
        if count == 0 {
            return if self.draw.chance(0.3) { self.draw.pick(ABSURD).into() } else { text.into() };
        }
        let chosen = if self.draw.chance(0.2) { None } else { Some(self.draw.count(0, count - 1)) };
        let (mut out, mut seen) = (String::new(), 0);
        for part in text.split_inclusive(is_separator) {
            let word = part.trim_end_matches(is_separator);
            if !is_number(word) {
                out += part;
                continue;
            }
            if chosen.is_none_or(|c| c == seen) {
                let whole = word.parse::<u64>().is_ok();
                let from = if whole && self.draw.chance(0.8) { FAR_COUNTS } else { FAR };
                out += self.draw.pick(from);
                out += &part[word.len()..];
            } else {
                out += part;
            }
            seen += 1;
        }
        out
    }

    fn maybe(&mut self, probability: f64, name: &str, ordinary: impl FnOnce(&mut Self) -> String) {
        // Odd calls give odd values to fields that others leave out.
        if self.draw.chance(probability + 0.3 * self.odd) {
            self.put(name, ordinary);
        }
    }

    fn flag(&mut self, name: &str, value: String) {
        self.call.flags.push(vec![format!("--{}", name.replace('_', "-")), value]);
    }

    fn number(&mut self, from: f64, to: f64) -> String {
        format!("{:.4}", self.draw.within(from, to))
    }

    fn count(&mut self, from: usize, to: usize) -> String {
        self.draw.count(from, to).to_string()
    }

    fn numbers(&mut self, count: usize, from: f64, to: f64) -> String {
        (0..count).map(|_| self.number(from, to)).collect::<Vec<_>>().join(",")
    }

    fn tolerance(&mut self) -> String {
        self.draw.pick(&["1e-13", "1e-10", "1e-8", "1e-6", "1e-4", "1e-3", "1e-2"]).into()
    }

    fn task(&mut self) {
        let long = self.draw.chance(0.08);
        self.length = if long { self.draw.pick(&[50, 300, 2000, 100_000]) } else { self.draw.count(2, 7) };
        self.put("length", |m| m.length.to_string());
        if self.draw.chance(0.85) {
            let theta = self.theta();
            self.put("theta", |_| theta);
        } else {
            self.features = 2;
        }
    }

    /// Sets the number of features.
    fn theta(&mut self) -> String {
        let far = self.draw.chance(self.odd + 0.05);
        self.features = if far { self.draw.pick(&[1, 2, 3, 3, 4, 6, 20, 64]) } else { self.draw.count(1, 2) };
        let features = self.features;
        let size = |m: &mut Self| -> f64 {
            if far && m.draw.chance(0.5) {
                m.draw.pick(&[
                    0.0, 0.0, 1e-300, 1e-100, 1e-20, 1e-8, 1e-3, 1e-3, 10.0, 30.0, 1e2, 1e3, 1e4, 1e5, 1e6, 1e300,
                ])
            } else {
                (1e3 * m.draw.within(0.3, 3.0)).round() / 1e3
            }
        };
        let list = |m: &mut Self, count: usize| (0..count).map(|_| size(m)).collect::<Vec<f64>>();
        let text = |values: &[f64]| values.iter().map(|v| format!("{v:e}")).collect::<Vec<_>>().join(",");
        let kind = self.draw.count(0, 9);
        match kind {
            0..=3 => {
                let nu = list(self, features);
                format!("flip:{}", text(&nu))
            }
            4..=5 => {
                let (mean, sd) = (list(self, features), list(self, features));
                let mean: Vec<f64> = if self.draw.chance(0.5) { vec![0.0; features] } else { mean };
                format!("gaussian:mean={}:sd={}", text(&mean), text(&sd))
            }
            6 => {
                let nu = size(self);
                format!("sphere:nu={nu:e}:features={features}")
            }
            7 => {
                let cov = self.covariance();
                json!({"kind": "gaussian", "mean": vec![0.0; features], "cov": cov}).to_string()
            }
            _ => {
                let count = self.draw.count(1, if far { 12 } else { 4 });
                let points: Vec<Vec<f64>> = (0..count)
                    .map(|_| {
                        list(self, features).into_iter().map(|v| if self.draw.chance(0.5) { -v } else { v }).collect()
                    })
                    .collect();
                let mut weights: Vec<f64> =
                    (0..count)
                        .map(|_| {
                            if far && self.draw.chance(0.3) { self.draw.pick(&[0.0, 1e-300, 1e-12, 1e-4]) } else { 1.0 }
                        })
                        .collect();
                weights[0] = weights[0].max(0.1);
                let sum: f64 = weights.iter().sum();
                weights.iter_mut().for_each(|w| *w /= sum);
                json!({"kind": "discrete", "points": points, "weights": weights}).to_string()
            }
        }
    }

    /// Of a matrix `A A^T`, at times singular, nearly so, or not even semi-definite.
    fn covariance(&mut self) -> Vec<Vec<f64>> {
        let n = self.features;
        let rank = self.draw.count(1, n);
        let a: Vec<Vec<f64>> = (0..n).map(|_| (0..rank).map(|_| self.draw.normal()).collect()).collect();
        let more = self.draw.pick(&[0.0, 0.0, 1e-15, 1e-6, 0.3, -1e-15, -1e-3]);
        let scale = if self.draw.chance(self.odd) { self.draw.pick(&[1e-200, 1e-10, 1e10, 1e200]) } else { 1.0 };
        let entry = |i: usize, j: usize| {
            let product: f64 = (0..rank).map(|k| a[i][k] * a[j][k]).sum();
            scale * (product + if i == j { more } else { 0.0 })
        };
        (0..n).map(|i| (0..n).map(|j| entry(i, j)).collect()).collect()
    }

    fn attention(&mut self) {
        let attention = self.draw.pick(&["softmax", "softmax1", "bayes-softmax"]);
        self.softmax1 = attention != "softmax";
        self.trained = self.softmax1;
        self.put("attention", |_| attention.into());
        if self.draw.chance(0.25) {
            let bias = self.draw.pick(&["none", "half-norm", "trained"]);
            self.trained = bias == "trained";
            self.put("bias", |_| bias.into());
        }
        self.maybe(0.2, "aggregation", |m| m.draw.pick(&["mean", "sum"]).into());
    }

    fn heads_for_a_search(&mut self) {
        self.heads = self.draw.count(1, 3);
        self.put("heads", |m| m.heads.to_string());
    }

    fn search(&mut self) {
        self.put("starts", |m| m.count(1, 3));
        if self.draw.chance(0.6) {
            self.maybe(0.8, "tolerance", |m| m.draw.pick(&["1e-6", "1e-4", "1e-3", "1e-2"]).into());
        } else {
            self.points();
        }
        self.maybe(0.2, "seed", |m| m.count(0, 9));
    }

    fn points(&mut self) {
        self.put("points", |m| m.draw.pick(&["64", "128", "256", "1024"]).into());
        self.put("scrambles", |m| m.count(1, 4));
    }

    /// Heads, and with some probability their number by a flag.
    fn head_count(&mut self) {
        let many = self.draw.chance(0.05);
        self.heads = if many { self.draw.pick(&[8, 16, 40]) } else { self.draw.count(1, 4) };
    }

    /// Alignments and overlaps of `heads` heads.
    fn overlaps(&mut self) -> (String, Option<String>) {
        let (heads, features) = (self.heads, self.features);
        let far = self.draw.chance(self.odd + 0.05);
        let size = if far {
            self.draw.pick(&[0.0, 1e-300, 1e-160, 1e-8, 10.0, 100.0, 1e3, 1e6, 1e100, 1e154, 1e300])
        } else {
            self.draw.within(0.1, 2.0)
        };
        let m: Vec<Vec<f64>> = (0..heads).map(|_| (0..features).map(|_| size * self.draw.normal()).collect()).collect();
        let rank = self.draw.count(0, heads.min(4));
        let rest = if far { size.max(1e-8) } else { self.draw.within(0.0, 1.5) };
        let c: Vec<Vec<f64>> = (0..heads).map(|_| (0..rank).map(|_| rest * self.draw.normal()).collect()).collect();
        let more = if self.draw.chance(0.5) {
            0.0
        } else {
            self.draw.pick(&[0.3, 1.0, 1e-6, 1e-12, 1e-15, -1e-16, -1e-12, -1e-6, -0.5])
        };
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
        let r: Vec<Vec<f64>> = (0..heads)
            .map(|i| {
                let entry = |j: usize| dot(&m[i], &m[j]) + dot(&c[i], &c[j]) + if i == j { more } else { 0.0 };
                (0..heads).map(entry).collect()
            })
            .collect();
        let given = self.draw.chance(0.75);
        (rows(&m), given.then(|| rows(&r)))
    }

    fn biases(&mut self) -> String {
        let far = self.draw.chance(self.odd + 0.05);
        let heads = self.heads;
        let each = |m: &mut Self| {
            if far && m.draw.chance(0.5) {
                m.draw.pick(&["0", "-30", "-745", "745", "1e3", "-1e3", "1e20", "-1e20", "1e300", "-1e300"]).to_string()
            } else {
                m.number(-3.0, 1.0)
            }
        };
        (0..heads).map(|_| each(self)).collect::<Vec<_>>().join(",")
    }

    fn point(&mut self) {
        let (m, r) = self.overlaps();
        self.put("m", |_| m);
        if let Some(r) = r {
            self.put("r", |_| r);
        }
        if self.trained {
            let b = self.biases();
            self.maybe(0.7, "b", |_| b);
        }
    }

    fn loss(&mut self) {
        self.task();
        self.attention();
        self.head_count();
        self.point();
        match self.draw.count(0, 3) {
            0 => {
                self.points();
                self.maybe(0.3, "evaluator", |_| "qmc".into());
                self.maybe(0.3, "seed", |m| m.count(0, 9));
            }
            1 => self.maybe(1.0, "tolerance", |m| m.tolerance()),
            2 => self.maybe(0.7, "evaluator", |m| m.draw.pick(&["quadrature", "qmc"]).into()),
            _ => {}
        }
    }

    /// The task, the attention, and where keys start.
    fn start(&mut self, given: bool) {
        self.task();
        self.length = self.length.min(50);
        self.attention();
        self.head_count();
        if given && self.draw.chance(0.5) {
            let (m, r) = self.overlaps();
            self.put("m0", |_| m);
            if let Some(r) = r {
                self.put("r0", |_| r);
            }
        } else {
            self.put("heads", |m| m.heads.to_string());
            self.maybe(0.4, "key_scale", |m| m.number(0.0, 1.5));
        }
        if self.trained {
            let b = self.biases();
            self.maybe(0.4, "b0", |_| b);
        }
    }

    fn learning(&mut self, zero: bool) {
        if zero {
            self.put("gamma", |_| "0".into());
        } else {
            self.maybe(0.5, "gamma", |m| m.number(0.1, 4.0));
            self.maybe(0.2, "batch", |m| m.count(1, 4));
        }
    }

    fn times(&mut self, last: f64) {
        if self.draw.chance(0.2) {
            self.put("times", |m| {
                let step = last / 4.0;
                let (a, b) = (m.number(0.0, step), m.number(2.0 * step, last));
                format!("{a},{b}")
            });
        } else {
            let last = self.number(0.1 * last, last);
            self.put("tau", |_| last);
            self.put("records", |m| m.count(2, 8));
        }
    }

    /// How a flow is integrated.
    fn flow(&mut self) {
        let exact = self.draw.chance(0.25);
        let zero = exact || self.draw.chance(0.3);
        self.learning(zero);
        let last = if exact { 3.0 } else { self.draw.pick(&[2.0, 20.0, 200.0]) };
        self.times(last);
        if exact {
            self.put("evaluator", |_| "quadrature".into());
            self.put("tolerance", |m| m.draw.pick(&["1e-6", "1e-4", "1e-3"]).into());
        } else {
            self.points();
            self.maybe(0.1, "seed", |m| m.count(0, 9));
        }
        self.solver();
    }

    fn solver(&mut self) {
        self.maybe(0.3, "method", |m| m.draw.pick(&["tsit45", "bdf", "tr-bdf2", "esdirk34"]).into());
        self.maybe(0.2, "relative_tolerance", |m| m.draw.pick(&["1e-9", "1e-6", "1e-3", "0.1"]).into());
        self.maybe(0.2, "absolute_tolerance", |m| m.draw.pick(&["1e-12", "1e-8", "1e-3"]).into());
        self.maybe(0.1, "max_steps", |m| m.draw.pick(&["1", "5", "50", "10000"]).into());
    }

    fn simulation(&mut self, random: bool) {
        if random {
            self.put("initial", |_| "random".into());
        }
        self.learning(false);
        self.times(3.0);
        self.put("replicas", |m| m.count(1, 4));
        self.put("test_samples", |m| m.count(2, 64));
        self.maybe(0.2, "seed", |m| m.count(0, 9));
    }

    fn engine(&mut self, name: &str) {
        let name = name.to_string();
        self.put("engine", |_| name);
    }

    fn stability(&mut self) {
        self.task();
        self.attention();
        self.head_count();
        let zero = self.draw.chance(0.5);
        match self.draw.count(0, 3) {
            0 => {
                // Where keys vanish, the drift does too; elsewhere points are hardly ever stationary.
                if self.draw.chance(0.5) {
                    let rows = |columns: usize, heads: usize| vec![vec!["0"; columns].join(","); heads].join(";");
                    let (heads, features) = (self.heads, self.features);
                    self.put("m", |_| rows(features, heads));
                    self.put("r", |_| rows(heads, heads));
                } else {
                    self.point();
                }
                self.maybe(0.7, "stationary_tolerance", |m| m.draw.pick(&["1e-3", "0.1", "10", "1e3"]).into());
                self.learning(zero);
            }
            1 => {
                self.put("at", |_| "plateaus".into());
                self.put("heads", |m| m.heads.to_string());
                self.learning(zero);
                let last = self.number(5.0, 60.0);
                self.put("tau", |_| last);
                self.put("records", |m| m.count(10, 60));
                self.criteria();
            }
            _ => {
                self.put("heads", |m| m.heads.to_string());
                self.learning(zero);
                self.maybe(0.3, "key_scale", |m| m.number(0.0, 1.0));
                self.maybe(0.3, "dimensions", |m| format!("{},{}", m.count(2, 100), m.draw.pick(&["1000", "1000000"])));
            }
        }
        if zero && self.draw.chance(0.4) {
            self.put("evaluator", |_| "quadrature".into());
            self.put("tolerance", |m| m.draw.pick(&["1e-8", "1e-6", "1e-4"]).into());
        } else {
            self.points();
        }
    }

    fn criteria(&mut self) {
        self.maybe(0.3, "on", |m| m.number(0.05, 0.95));
        self.maybe(0.3, "motion", |m| m.number(0.01, 0.5));
        self.maybe(0.3, "contrast", |m| m.number(1.1, 5.0));
    }

    fn stages(&mut self) {
        let random = self.draw.chance(0.25);
        self.start(!random);
        if random || self.draw.chance(0.25) {
            self.simulation(random);
            let chain = self.draw.chance(0.6);
            self.engine(if chain { "overlap" } else { "direct" });
            let least = self.heads + self.features + self.length;
            self.put("dimension", |m| m.count(least, least + 40));
            self.call.flags.retain(|words| words[0] != "--records");
            self.put("records", |m| m.count(10, 20));
        } else {
            self.learning(false);
            let last = self.number(5.0, 100.0);
            self.put("tau", |_| last);
            self.put("records", |m| m.count(10, 60));
            self.points();
        }
        self.criteria();
    }

    fn prune(&mut self) {
        match self.draw.count(0, 2) {
            0 => {
                self.task();
                self.attention();
                self.head_count();
                self.heads = self.heads.min(8);
                self.point();
            }
            1 => {
                let random = self.draw.chance(0.4);
                self.start(!random);
                self.learning(false);
                self.times(10.0);
                self.put("points", |m| m.draw.pick(&["64", "256"]).into());
                if random {
                    self.put("initial", |_| "random".into());
                    self.put("replicas", |m| m.count(1, 3));
                    self.put("dimension", |m| m.count(m.heads + m.features, 100));
                }
            }
            _ => {
                let random = self.draw.chance(0.5);
                self.start(!random);
                self.simulation(random);
                self.engine("direct");
                self.put("dimension", |m| m.count(m.heads + m.features, 60));
            }
        }
        self.maybe(0.3, "subsets", |m| m.count(1, 40));
        self.maybe(0.3, "most_removed", |m| m.count(0, m.heads));
        self.maybe(0.3, "prune_tolerances", |m| m.numbers(2, 0.0, 0.2));
        self.maybe(0.3, "tolerance", |m| m.draw.pick(&["1e-6", "1e-4", "1e-2"]).into());
    }

    fn phase(&mut self) {
        let quantity = self.draw.pick(&[
            "bayes-risk",
            "bayes-risk",
            "optimal-loss",
            "regret",
            "flow-loss",
            "specialised-heads",
            "stages",
            "growth-rate",
        ]);
        let theta = self.draw.pick(&["flip:1", "flip:2,1", "gaussian:mean=0.5:sd=1", "sphere:nu=2:features=2"]);
        self.put("theta", |_| theta.into());
        let parts: &[&str] = match theta {
            "flip:2,1" => &["theta.nu", "theta.nu[0]", "theta.nu[1]", "theta.scale"],
            "gaussian:mean=0.5:sd=1" => &["theta.sd", "theta.mean", "theta.mean[0]", "theta.scale"],
            _ => &["theta.nu", "theta.scale"],
        };
        match quantity {
            "bayes-risk" => {}
            "optimal-loss" | "regret" => {
                self.attention();
                self.heads_for_a_search();
                self.put("starts", |_| "1".into());
                self.maybe(0.9, "tolerance", |m| m.draw.pick(&["1e-4", "1e-3", "1e-2"]).into());
            }
            "growth-rate" => {
                self.heads_for_a_search();
                self.learning(false);
                self.points();
            }
            _ => {
                self.attention();
                self.heads_for_a_search();
                self.learning(true);
                self.put("tau", |m| m.number(1.0, 20.0));
                self.put("records", |m| m.count(5, 30));
                self.put("points", |_| "64".into());
            }
        }
        if self.draw.chance(0.9) {
            self.put("quantity", |_| quantity.into());
        }
        let other: &[&str] = match quantity {
            "bayes-risk" => &["length", "tolerance"],
            "optimal-loss" | "regret" => &["length", "heads", "seed"],
            "growth-rate" => &["length", "points", "seed"],
            _ => &["length", "points", "key_scale"],
        };
        for (side, own) in [("x", parts), ("y", other)] {
            let any = ["theta", "theta.nu[9]", "gamma", "m0", "attention", "records", "nonsense"];
            let field = if self.draw.chance(self.odd) { self.draw.pick(&any) } else { self.draw.pick(own) };
            let axis = self.axis(field);
            self.put(side, |_| axis);
        }
    }

    fn axis(&mut self, field: &str) -> String {
        let range = |m: &mut Self| match field {
            "length" => m.draw.pick(&["2,4", "3,100000", "2:6:2", "log:2:100:3"]).to_string(),
            "heads" => "1,2".into(),
            "tolerance" => "1e-4,1e-3".into(),
            "points" => "64,128".into(),
            "seed" => "1,2".into(),
            _ => m.draw.pick(&["0.5,2", "0.5:3:2", "log:0.1:10:2", "0,1"]).to_string(),
        };
        let range = if self.draw.chance(self.odd) {
            let (from, to) = (self.draw.pick(FAR), self.draw.pick(FAR));
            let count = self.draw.pick(&["0", "1", "2", "3", "10001", "1000000000000", "-1", "2.5"]);
            self.draw
                .pick(&[0, 1, 2])
                .to_string()
                .replace('0', &format!("{from}:{to}:{count}"))
                .replace('1', &format!("{from},{to}"))
                .replace('2', &format!("log:{from}:{to}:2"))
        } else {
            range(self)
        };
        format!("{field}={range}")
    }

    fn exclusive(&mut self) {
        if self.draw.chance(0.2) {
            self.call.command.push("measure".into());
            self.call
                .files
                .push(("model.gguf".into(), b"GGUF\x03\x00\x00\x00\xff\xff\xff\xff\xff\xff\xff\xff".to_vec()));
            self.call.files.push(("text.txt".into(), b"One token carries a signal.".to_vec()));
            self.maybe(0.9, "model", |_| "model.gguf".into());
            self.maybe(0.9, "text", |_| "text.txt".into());
            return;
        }
        self.call.command.push("bias".into());
        let side =
            |m: &mut Self| m.draw.pick(&["0,0.5", "0.1:0.9:2", "log:0.01:0.9:2", "0:1:3", "0.2,0.3,0.4"]).to_string();
        self.put("rho", side);
        self.put("self_attention", |m| m.draw.pick(&["0.1,0.5", "log:0.01:0.9:2"]).into());
        self.put("lengths", |m| m.draw.pick(&["2", "2,3", "16", "64,7"]).into());
        self.put("sequences", |m| m.count(1, 3));
        self.put("key_size", |m| m.count(1, 32));
        self.put("value_size", |m| m.count(1, 32));
        self.maybe(0.3, "spread", |m| m.number(0.0, 3.0));
        self.maybe(0.3, "seed", |m| m.count(0, 9));
    }

    fn figure(&mut self) {
        let name =
            self.draw.pick(&["spectrum", "hierarchy", "specialization", "comparison", "xsa-model", "scpectrum", ""]);
        self.call.command.push(name.into());
        if name == "comparison" || name == "xsa-model" {
            self.maybe(0.3, "tau", |m| m.number(1.0, 3.0));
            return;
        }
        self.put("theta", |m| m.draw.pick(&["flip:2", "flip:2,1", "gaussian:mean=0:sd=2"]).into());
        self.heads = self.draw.count(1, 3);
        self.put("heads", |m| m.heads.to_string());
        self.put("tau", |m| m.number(1.0, 3.0));
        self.put("records", |m| m.count(3, 6));
        self.put("points", |_| "64".into());
        if name != "spectrum" {
            self.maybe(0.9, "replicas", |m| m.count(1, 3));
            self.maybe(0.9, "test_samples", |m| m.count(2, 64));
            self.put(if name == "hierarchy" { "dimension" } else { "dimensions" }, |m| m.count(20, 60));
        }
    }

    /// Commands that read results.
    fn from(&mut self, material: &Material) {
        let (kind, files) = &material.results[self.draw.count(0, material.results.len() - 1)];
        self.call.files = files.iter().map(|(name, content)| (format!("old/{name}"), content.clone())).collect();
        let spoils = self.draw.pick(&[0, 1, 1, 1, 2, 3]);
        for _ in 0..spoils {
            self.spoil();
        }
        let own: &[&str] = match kind.as_str() {
            "compare" => &["comparison", "stages"],
            "flow" => &["comparison", "stages"],
            "spectrum" => &["spectrum", "stages"],
            "prune" => &["pruning"],
            "phase" => &["retrieval", "heads", "specialised"],
            "xsa-bias" => &["xsa-bias"],
            _ => &["simulate"],
        };
        let any = [
            "comparison",
            "specialization",
            "escape",
            "hierarchy",
            "spectrum",
            "retrieval",
            "heads",
            "specialised",
            "stages",
            "activations",
            "pruning",
            "xsa-bias",
            "xsa-model",
        ];
        let what = if self.draw.chance(0.8) { self.draw.pick(own) } else { self.draw.pick(&any) };
        let (command, flag) = match what {
            "simulate" => (vec!["simulate".to_string()], "resume"),
            "stages" if self.draw.chance(0.5) => (vec!["stages".to_string()], "from"),
            name => (vec!["figure".to_string(), name.to_string()], "from"),
        };
        self.call.command = command;
        let folder =
            if self.draw.chance(0.95) { "old" } else { self.draw.pick(&["none", "", "old/result.json", "/proc"]) };
        self.flag(flag, folder.into());
        if self.draw.chance(0.3) && flag == "from" {
            self.flag("out", "new".into());
        }
    }

    /// Spoils one file.
    fn spoil(&mut self) {
        if self.call.files.is_empty() {
            return;
        }
        let index = self.draw.count(0, self.call.files.len() - 1);
        let odd = self.draw.chance(0.2);
        let (name, content) = &mut self.call.files[index];
        if odd || content.is_empty() {
            match self.draw.count(0, 3) {
                0 => content.truncate(content.len() / 2),
                1 => content.clear(),
                2 => {
                    let at = self.draw.count(0, content.len().max(1) - 1);
                    if let Some(byte) = content.get_mut(at) {
                        *byte ^= 0x55;
                    }
                }
                _ => {
                    self.call.files.remove(index);
                }
            }
        } else if name.ends_with(".json") {
            if let Ok(mut document) = serde_json::from_slice::<Value>(content) {
                spoil_value(self.draw, &mut document);
                *content = document.to_string().into_bytes();
            }
        } else {
            // A table: another word somewhere.
            let text = String::from_utf8_lossy(content).into_owned();
            let mut words: Vec<&str> = text.split(',').collect();
            let at = self.draw.count(0, words.len() - 1);
            words[at] = if self.draw.chance(0.5) { self.draw.pick(FAR) } else { self.draw.pick(ABSURD) };
            *content = words.join(",").into_bytes();
        }
    }
}

/// Replaces one value of a document, at any depth.
fn spoil_value(draw: &mut Draw, value: &mut Value) {
    let deeper = draw.chance(0.9);
    match value {
        Value::Object(map) if deeper && !map.is_empty() => {
            let names: Vec<String> = map.keys().cloned().collect();
            let name = &names[draw.count(0, names.len() - 1)];
            if draw.chance(0.1) {
                map.remove(name);
            } else {
                spoil_value(draw, &mut map[name]);
            }
        }
        Value::Array(list) if deeper && !list.is_empty() => {
            let at = draw.count(0, list.len() - 1);
            match draw.count(0, 9) {
                0 => {
                    list.remove(at);
                }
                1 => list.push(list[at].clone()),
                _ => spoil_value(draw, &mut list[at]),
            }
        }
        _ => {
            *value = match draw.count(0, 10) {
                0 => Value::Null,
                1 => json!(""),
                2 => json!([]),
                3 => json!({}),
                4 => json!(-1),
                5 => json!(0),
                6 => json!(1e300),
                7 => json!(-1e300),
                8 => json!(5e-324),
                9 => json!(1u64 << 40),
                _ => json!("a\nb"),
            }
        }
    }
}

fn rows(matrix: &[Vec<f64>]) -> String {
    let row = |row: &Vec<f64>| row.iter().map(|v| format!("{v:e}")).collect::<Vec<_>>().join(",");
    matrix.iter().map(row).collect::<Vec<_>>().join(";")
}

/// What a flag's value is in a file of JSON.
fn in_json(name: &str, value: &str) -> String {
    let list = |text: &str| format!("[{text}]");
    match name {
        "times" | "b" | "b0" | "dimensions" | "prune_tolerances" | "stop_alignment" => list(value),
        "m" | "r" | "m0" | "r0" => list(&value.split(';').map(list).collect::<Vec<_>>().join(", ")),
        "theta" if !value.starts_with('{') => {
            let mut parts = value.split(':');
            let kind = parts.next().unwrap_or_default();
            let mut text = format!("{{\"kind\": \"{kind}\"");
            for part in parts {
                let (key, numbers) = part.split_once('=').unwrap_or(("nu", part));
                let scalar = kind == "sphere";
                text += &format!(", \"{key}\": {}", if scalar { numbers.to_string() } else { list(numbers) });
            }
            text + "}"
        }
        _ if serde_json::from_str::<Value>(value).is_ok() => value.to_string(),
        _ => json!(value).to_string(),
    }
}

/// Moves the fields of a spec to a file, and does to the file what people and programs do.
fn to_file(draw: &mut Draw, call: &mut Call) {
    let commands = ["loss", "bayes", "optimum", "flow", "simulate", "compare", "stability", "stages", "prune", "phase"];
    if !commands.iter().any(|c| call.is(c)) || call.flag("--from") || call.flag("--resume") {
        return;
    }
    let no_fields = ["--json", "--threads", "--out", "--x", "--y", "--quantity"];
    let (fields, flags): (Vec<_>, Vec<_>) =
        call.flags.drain(..).partition(|words| !no_fields.contains(&words[0].as_str()) && draw.chance(0.8));
    call.flags = flags;
    let mut fields: Vec<(String, String)> = fields
        .into_iter()
        .map(|words| {
            let name = words[0].trim_start_matches('-').replace('-', "_");
            let value = in_json(&name, &words[1]);
            (name, value)
        })
        .collect();
    let mut before = String::new();
    if draw.chance(0.5) {
        match draw.count(0, 7) {
            0 => before = "\u{feff}".into(),
            1 => fields.push(("batch".into(), "1.0".into())),
            2 => fields.push(("seed".into(), "null".into())),
            3 => fields.push(("lenght".into(), "6".into())),
            4 => {
                if let Some(twice) = fields.first().cloned() {
                    fields.push(twice);
                }
            }
            5 => fields.push((
                "length".into(),
                draw.pick(&["\"6\"", "6.0", "6e0", "6.5", "-6", "true", "[6]", "1e40"]).into(),
            )),
            6 => fields
                .push(("theta".into(), draw.pick(&["{}", "[]", "\"flip:1\"", "null", "{\"kind\": \"flip\"}"]).into())),
            _ => before = draw.pick(&[" \n", "[", "{", "// spec\n", "\0"]).into(),
        }
    }
    call.file = Some((before, fields));
}
