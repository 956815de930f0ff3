//! Reading a result folder.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use headflow_model::series::{Series, read_csv};
use headflow_model::text::{cut, short};
use headflow_model::{Activation, Theta};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::error::Error;

/// Fields of `result.json` that only some figures read.
const EXTRA: [&str; 3] = ["stages", "predicted", "spectrum"];

/// The part of `result.json` that figures need; other fields are ignored.
#[derive(Debug, Clone, PartialEq, Deserialize)]
struct Header {
    command: String,
    spec: Spec,
}

/// The run's parameters, as far as figures name them.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct Spec {
    /// Number of tokens `L`.
    pub length: usize,
    /// Number of heads `H`.
    pub heads: usize,
    /// Distribution of the hidden weights.
    pub theta: Theta,
    /// Activation of the attention.
    pub attention: Activation,
    /// Learning rate `gamma`.
    pub gamma: f64,
    /// Batch size `B`; without noise it has no effect and is not told.
    #[serde(default = "one")]
    pub batch: usize,
}

fn one() -> usize {
    1
}

impl Spec {
    /// The spec in words, part by part, so that figures of several runs can state common parts once.
    pub fn words(&self) -> Vec<String> {
        let mut words = self.words_beside_theta();
        words.insert(3, theta_in_words(&self.theta));
        words
    }

    /// The same without the distribution of `theta`.
    pub fn words_beside_theta(&self) -> Vec<String> {
        vec![
            format!("{} attention", self.attention.name()),
            format!("L = {}", self.length),
            format!("H = {}", self.heads),
            format!("γ = {}", minus(short(self.gamma))),
            format!("B = {}", self.batch),
        ]
    }
}

fn minus(number: String) -> String {
    number.replace('-', "−")
}

/// The first entries of a list, and how many there are where some are left out.
fn list(values: impl ExactSizeIterator<Item = String>) -> String {
    const MOST: usize = 8;
    let count = values.len();
    let mut words: Vec<String> = values.take(MOST).collect();
    if count > MOST {
        words.push(format!("… ({count} in all)"));
    }
    words.join(", ")
}

fn tuple(values: &[f64]) -> String {
    format!("({})", list(values.iter().map(|v| minus(short(*v)))))
}

fn theta_in_words(theta: &Theta) -> String {
    match theta {
        Theta::Flip { nu } => {
            format!("flips θ = ({})", list(nu.iter().map(|v| minus(format!("±{}", short(v.abs()))))))
        }
        Theta::Gaussian { mean, sd: Some(sd), .. } => {
            format!("Gaussian θ, mean {}, standard deviation {}", tuple(mean), tuple(sd))
        }
        Theta::Gaussian { mean, cov, .. } => {
            let rows = cov.as_deref().unwrap_or_default().iter().map(|row| tuple(row));
            format!("Gaussian θ, mean {}, covariance ({})", tuple(mean), list(rows))
        }
        Theta::Discrete { points, .. } if points.len() > 4 => format!("discrete θ on {} points", points.len()),
        Theta::Discrete { points, weights } => {
            let points = list(points.iter().map(|point| tuple(point)));
            format!("discrete θ on {points} with weights {}", tuple(weights))
        }
        Theta::Sphere { nu, features } => {
            format!("θ uniform on the sphere, |θ| = {}, F = {features}", minus(short(*nu)))
        }
    }
}

/// How SGD at a finite dimension is simulated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Engine {
    /// Through the keys and the tokens themselves.
    Direct,
    /// Through the order parameters alone, exactly in law.
    Overlap,
}

/// One of the simulations in a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Simulation {
    pub engine: Engine,
    pub dimension: usize,
}

/// Where a route's numbers come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    /// The flow of the order parameters; `dimension` when it starts where that dimension does.
    Theory { dimension: Option<usize> },
    /// SGD: the mean over replicas, or one replica.
    Simulation { simulation: Simulation, replica: Option<usize> },
}

impl Route {
    pub fn parse(name: &str) -> Option<Self> {
        let mut words = name.split(' ');
        let kind = words.next()?;
        let (mut dimension, mut replica) = (None, None);
        for word in words {
            match word.split_once('=')? {
                ("D", value) if dimension.is_none() => dimension = Some(value.parse().ok()?),
                ("replica", value) if replica.is_none() => replica = Some(value.parse().ok()?),
                _ => return None,
            }
        }
        let engine = match kind {
            "theory" if replica.is_none() => return Some(Self::Theory { dimension }),
            "direct" => Engine::Direct,
            "overlap" => Engine::Overlap,
            _ => return None,
        };
        Some(Self::Simulation { simulation: Simulation { engine, dimension: dimension? }, replica })
    }
}

/// A result folder, read and checked.
#[derive(Debug, Clone)]
pub struct ResultFolder {
    path: PathBuf,
    command: String,
    spec: Spec,
    series: Vec<(Route, Series)>,
    /// Those of [`EXTRA`] that are there.
    extra: Map<String, Value>,
}

/// `result.json` of the folder at `path`, with its own path, checked to be a headflow result.
pub(crate) fn read_document(path: &Path) -> Result<(PathBuf, Value), Error> {
    let header = path.join("result.json");
    let file = File::open(&header).map_err(|e| Error::reading(&header, e))?;
    // The format first: a foreign document should not be blamed for a missing field.
    let mut document: Value = serde_json::from_reader(BufReader::new(file))
        .map_err(|e| Error::unreadable(&header, format!("not a JSON document, or truncated: {e}")))?;
    if document.get("format").and_then(|f| f.as_str()) != Some("headflow-result") {
        return Err(Error::unreadable(&header, "not a headflow result (\"format\" is not \"headflow-result\")"));
    }
    make_showable(&mut document);
    Ok((header, document))
}

/// Makes every text of a document fit to be drawn: whoever wrote it, it commands nothing and has an end.
fn make_showable(value: &mut Value) {
    const MOST: usize = 400;
    match value {
        Value::String(text) => *text = cut(text, MOST),
        Value::Array(entries) => entries.iter_mut().for_each(make_showable),
        Value::Object(fields) => fields.values_mut().for_each(make_showable),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// The field `name` of the document in the file `header`; `None` where it is absent or null.
pub(crate) fn read_field<T: DeserializeOwned>(
    header: &Path,
    name: &str,
    value: Option<&Value>,
) -> Result<Option<T>, Error> {
    let value = value.filter(|value| !value.is_null());
    value
        .map(|value| T::deserialize(value).map_err(|e| Error::unreadable(header, format!("field \"{name}\": {e}"))))
        .transpose()
}

/// The field `name` of the document in the file `header`, which must be there.
pub(crate) fn read_needed<T: DeserializeOwned>(header: &Path, name: &str, document: &Value) -> Result<T, Error> {
    read_field(header, name, document.get(name))?.ok_or_else(|| Error::lacking(header, name))
}

/// The field `name`, a list that is not empty, of the document in the file `header`.
pub(crate) fn read_list<T: DeserializeOwned>(header: &Path, name: &str, document: &Value) -> Result<Vec<T>, Error> {
    let entries: Vec<Value> = read_needed(header, name, document)?;
    if entries.is_empty() {
        return Err(Error::unreadable(header, format!("field \"{name}\" is an empty list")));
    }
    let read = |(number, entry): (usize, &Value)| {
        let problem = |e| Error::unreadable(header, format!("field \"{name}\", entry {}: {e}", number + 1));
        T::deserialize(entry).map_err(problem)
    };
    entries.iter().enumerate().map(read).collect()
}

/// A point in a document; null where a number is not finite.
pub(crate) type Pair = (Option<f64>, Option<f64>);

/// Such points with NaN for null.
pub(crate) fn points(pairs: &[Pair]) -> Vec<(f64, f64)> {
    let number = |value: Option<f64>| value.unwrap_or(f64::NAN);
    pairs.iter().map(|&(x, y)| (number(x), number(y))).collect()
}

impl ResultFolder {
    /// Reads `result.json` and `series.csv` in the folder at `path`.
    ///
    /// # Errors
    /// One line that names the file: [`Error::Missing`] when it is not there, [`Error::File`] when
    /// it cannot be read, [`Error::Unreadable`] or [`Error::Series`] when it is truncated, not a
    /// headflow result, or does not fit the other file.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let (header, document) = read_document(path)?;
        let mut extra = Map::new();
        for name in EXTRA {
            if let Some(value) = document.get(name) {
                extra.insert(name.into(), value.clone());
            }
        }
        // A table that ends after a whole record shows beside the document alone.
        let recorded: Vec<(String, usize)> = document["routes"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|route| Some((route["route"].as_str()?.to_string(), route["times"].as_array()?.len())))
            .filter(|(_, times)| *times > 0)
            .collect();
        let Header { command, spec } = Header::deserialize(document)
            .map_err(|e| Error::unreadable(&header, format!("not a complete headflow result: {e}")))?;

        let table = path.join("series.csv");
        let file = File::open(&table).map_err(|e| Error::reading(&table, e))?;
        let series = read_csv(BufReader::new(file), &table.display().to_string()).map_err(Error::Series)?;
        for (route, times) in recorded {
            let found = series.iter().find(|series| series.route == route).map_or(0, |s| s.values.times.len());
            if found != times {
                let problem = format!(
                    "route \"{route}\" has {found} times, but {times} in result.json: the file is truncated, or of another run"
                );
                return Err(Error::unreadable(&table, problem));
            }
        }
        let series = series
            .into_iter()
            .map(|series| {
                let route = Route::parse(&series.route)
                    .ok_or_else(|| Error::unreadable(&table, format!("unknown route \"{}\"", series.route)))?;
                let shape = series.values.shape;
                if (shape.heads, shape.features) != (spec.heads, spec.theta.features()) {
                    let problem = format!(
                        "route \"{}\" has {} heads and {} features, but the spec in result.json has {} and {}",
                        series.route,
                        shape.heads,
                        shape.features,
                        spec.heads,
                        spec.theta.features()
                    );
                    return Err(Error::unreadable(&table, problem));
                }
                Ok((route, series))
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { path: path.into(), command, spec, series, extra })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The command that made the result.
    pub fn command(&self) -> &str {
        &self.command
    }

    /// The activation of the run's attention.
    pub fn attention(&self) -> Activation {
        self.spec.attention
    }

    pub(crate) fn spec(&self) -> &Spec {
        &self.spec
    }

    pub(crate) fn features(&self) -> usize {
        self.spec.theta.features()
    }

    /// The simulations with a route, the largest dimension first, at one dimension direct SGD first.
    pub(crate) fn simulations(&self) -> Vec<Simulation> {
        let simulations = self.series.iter().filter_map(|(route, _)| match route {
            Route::Simulation { simulation, .. } => Some(*simulation),
            Route::Theory { .. } => None,
        });
        in_order(simulations)
    }

    /// The simulation of the largest dimension, by direct SGD if there is any.
    pub(crate) fn leading(&self) -> Option<Simulation> {
        let simulations = self.simulations();
        simulations.iter().find(|s| s.engine == Engine::Direct).or(simulations.first()).copied()
    }

    /// The theory's routes with the dimension whose start they share, if they say so; the largest
    /// dimension first.
    pub(crate) fn theory(&self) -> Vec<(Option<usize>, &Series)> {
        let mut theory: Vec<_> = self
            .series
            .iter()
            .filter_map(|(route, series)| match route {
                Route::Theory { dimension } => Some((*dimension, series)),
                Route::Simulation { .. } => None,
            })
            .collect();
        theory.sort_by_key(|(dimension, _)| std::cmp::Reverse(dimension.unwrap_or(usize::MAX)));
        theory
    }

    /// The mean over replicas.
    pub(crate) fn mean(&self, simulation: Simulation) -> Option<&Series> {
        self.find(|route| route == Route::Simulation { simulation, replica: None })
    }

    /// The first replica that the table holds.
    pub(crate) fn replica(&self, simulation: Simulation) -> Option<&Series> {
        self.find(|route| matches!(route, Route::Simulation { simulation: s, replica: Some(_) } if s == simulation))
    }

    /// The path of `result.json`.
    pub(crate) fn header(&self) -> PathBuf {
        self.path.join("result.json")
    }

    /// One of the fields [`EXTRA`]; `None` where it is absent or null.
    pub(crate) fn field<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, Error> {
        read_field(&self.header(), name, self.extra.get(name))
    }

    /// All recorded times.
    pub(crate) fn times(&self) -> impl Iterator<Item = f64> + '_ {
        self.series.iter().flat_map(|(_, series)| series.values.times.iter().copied())
    }

    fn find(&self, wanted: impl Fn(Route) -> bool) -> Option<&Series> {
        self.series.iter().find(|(route, _)| wanted(*route)).map(|(_, series)| series)
    }
}

/// Each simulation once, the largest dimension first, at one dimension direct SGD first.
pub(crate) fn in_order(simulations: impl Iterator<Item = Simulation>) -> Vec<Simulation> {
    let mut simulations: Vec<_> = simulations.collect();
    simulations.sort_unstable_by_key(|s| (std::cmp::Reverse(s.dimension), s.engine));
    simulations.dedup();
    simulations
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::fixture::{Fixture, Routes};

    #[test]
    fn a_folder_gives_its_routes() {
        let fixture = Fixture::new(Activation::Softmax, Routes::All, 11);
        let folder = ResultFolder::open(fixture.path()).unwrap();
        let direct = |dimension| Simulation { engine: Engine::Direct, dimension };
        let overlap = |dimension| Simulation { engine: Engine::Overlap, dimension };
        assert_eq!(folder.simulations(), [direct(1000), direct(500)]);
        assert_eq!(folder.theory().len(), 1);
        assert!(folder.mean(direct(500)).is_some() && folder.mean(direct(1000)).is_some());
        assert!(folder.mean(direct(7)).is_none() && folder.mean(overlap(500)).is_none());
        assert!(folder.replica(direct(1000)).is_some());
        assert_eq!((folder.command(), folder.attention()), ("compare", Activation::Softmax));
        assert_eq!(folder.path(), fixture.path());

        let fixture = Fixture::new(Activation::Softmax, Routes::AllEngines, 11);
        let folder = ResultFolder::open(fixture.path()).unwrap();
        assert_eq!(folder.simulations(), [direct(1000), overlap(1000), direct(500), overlap(500)]);
        assert_eq!(folder.leading(), Some(direct(1000)));
        let fixture = Fixture::new(Activation::Softmax, Routes::Overlap, 11);
        assert_eq!(ResultFolder::open(fixture.path()).unwrap().leading(), Some(overlap(1000)));
    }

    #[test]
    fn route_names_are_read_strictly() {
        let simulated =
            |engine, replica| Some(Route::Simulation { simulation: Simulation { engine, dimension: 500 }, replica });
        assert_eq!(Route::parse("theory"), Some(Route::Theory { dimension: None }));
        assert_eq!(Route::parse("theory D=500"), Some(Route::Theory { dimension: Some(500) }));
        assert_eq!(Route::parse("direct D=500 replica=3"), simulated(Engine::Direct, Some(3)));
        assert_eq!(Route::parse("overlap D=500"), simulated(Engine::Overlap, None));
        assert_eq!(Route::parse("overlap D=500 replica=0"), simulated(Engine::Overlap, Some(0)));
        let foreign =
            ["", "direct", "overlap", "theory replica=1", "direct D=x", "direct D=1 D=2", "overlap replica=0"];
        for foreign in foreign.into_iter().chain(["magic D=5", "theory  D=5"]) {
            assert_eq!(Route::parse(foreign), None, "{foreign}");
        }
    }

    #[test]
    fn broken_results_are_refused_in_one_line_that_names_the_file() {
        let refused = |file: &str, change: &dyn Fn(&Path, String)| {
            let fixture = Fixture::new(Activation::Softmax, Routes::All, 11);
            let path = fixture.path().join(file);
            change(&path, fs::read_to_string(&path).unwrap());
            let message = ResultFolder::open(fixture.path()).unwrap_err().to_string();
            assert!(message.contains(file) && !message.contains('\n'), "{message}");
            message
        };
        refused("series.csv", &|path, text| fs::write(path, &text[..text.len() - 40]).unwrap());
        refused("series.csv", &|path, _| fs::write(path, "a,b\n1,2\n").unwrap());
        refused("series.csv", &|path, _| fs::write(path, "").unwrap());
        refused("series.csv", &|path, text| fs::write(path, text.replace("theory", "magic")).unwrap());
        refused("result.json", &|path, text| fs::write(path, &text[..text.len() / 2]).unwrap());
        refused("result.json", &|path, _| fs::write(path, "{\"format\": \"other\"}").unwrap());
        refused("result.json", &|path, _| fs::write(path, "[1, 2]").unwrap());
        refused("result.json", &|path, text| fs::write(path, text.replace("gamma", "delta")).unwrap());
        for file in ["series.csv", "result.json"] {
            assert!(refused(file, &|path, _| fs::remove_file(path).unwrap()).contains("no such file"));
        }
        let other = refused("series.csv", &|path, _| {
            let header = path.with_file_name("result.json");
            let text = fs::read_to_string(&header).unwrap();
            fs::write(&header, text.replace("\"heads\":4", "\"heads\":5")).unwrap();
        });
        assert!(other.contains("4 heads") && other.contains("has 5"), "{other}");
    }

    /// A table cut after a whole record is one that fewer times were recorded in: the document tells.
    #[test]
    fn a_table_that_is_shorter_than_its_document_is_truncated() {
        let fixture = Fixture::new(Activation::Softmax, Routes::All, 11);
        let header = fixture.path().join("result.json");
        let mut document: Value = serde_json::from_str(&fs::read_to_string(&header).unwrap()).unwrap();
        let mut with = |times: usize| {
            document["routes"] = serde_json::json!([{"route": "theory", "times": vec![0.0; times]}]);
            fs::write(&header, document.to_string()).unwrap();
            ResultFolder::open(fixture.path())
        };
        with(11).unwrap();
        for times in [10, 12] {
            let message = with(times).unwrap_err().to_string();
            assert!(message.contains("has 11 times, but ") && message.contains("truncated"), "{message}");
        }
    }

    #[test]
    fn every_distribution_has_words() {
        let words = |json: &str| theta_in_words(&serde_json::from_str(json).unwrap());
        assert_eq!(words(r#"{"kind":"flip","nu":[1.5,1]}"#), "flips θ = (±1.5, ±1)");
        assert!(words(r#"{"kind":"gaussian","mean":[-1],"sd":[2]}"#).contains("mean (−1), standard deviation (2)"));
        assert!(words(r#"{"kind":"gaussian","mean":[0],"cov":[[2]]}"#).contains("covariance ((2))"));
        assert!(words(r#"{"kind":"discrete","points":[[1],[2]],"weights":[0.5,0.5]}"#).contains("(1), (2)"));
        assert!(words(r#"{"kind":"sphere","nu":2,"features":3}"#).contains("|θ| = 2, F = 3"));
        // Huge and tiny numbers in short form, long lists by their beginning.
        assert_eq!(words(r#"{"kind":"flip","nu":[1e300,0.000000001234]}"#), "flips θ = (±1e300, ±1.234e−9)");
        let many = format!(r#"{{"kind":"flip","nu":{:?}}}"#, vec![2.0; 1000]);
        assert_eq!(words(&many), format!("flips θ = ({}… (1000 in all))", "±2, ".repeat(8)));
    }
}
