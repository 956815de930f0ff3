//! The tidy table of a run, `series.csv`: one number a line, read by people, scripts and figures.
//!
//! Columns `route,time,quantity,i,j,value,standard_error`. `route` names where the number comes
//! from: `theory`, `direct D=500` (mean over replicas), `direct D=500 replica=0`. `quantity` is
//! `loss`, `m` (`i` head, `j` feature), `r` (`i`, `j` heads), `b` (`i` head) or `trace` (of `r`);
//! `i` and `j` count from zero and are empty where they do not apply, as is an unknown
//! `standard_error`. Numbers are written so that reading them gives the same bits.

use std::collections::HashMap;
use std::io::{Read, Write};

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::trajectory::{Estimate, Quantity, Shape, Trajectory};

/// One route's numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    /// Where they come from.
    pub route: String,
    /// The values.
    pub values: Trajectory,
    /// Their standard errors, where known.
    pub errors: Option<Trajectory>,
    /// `tr r` at the same times, with its standard error (NaN where unknown).
    pub trace: Vec<(f64, f64)>,
}

impl Series {
    /// The mean over several trajectories.
    pub fn of_estimate(route: impl Into<String>, estimate: &Estimate, trace: &[(f64, f64)]) -> Self {
        Self {
            route: route.into(),
            values: estimate.mean.clone(),
            errors: estimate.standard_error.clone(),
            trace: trace[..estimate.mean.times.len()].to_vec(),
        }
    }

    /// A single trajectory.
    pub fn of_trajectory(route: impl Into<String>, trajectory: &Trajectory) -> Self {
        Self {
            route: route.into(),
            trace: trajectory.trace().into_iter().map(|t| (t, f64::NAN)).collect(),
            values: trajectory.clone(),
            errors: None,
        }
    }
}

/// A line of the table.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    route: String,
    time: f64,
    quantity: String,
    i: Option<usize>,
    j: Option<usize>,
    value: f64,
    standard_error: Option<f64>,
}

/// Writes the table.
///
/// # Errors
/// When the writer fails.
pub fn write_csv(series: &[Series], to: impl Write) -> Result<(), Error> {
    let failed = |e: csv::Error| Error::unwritable("series.csv", e);
    let mut writer = csv::Writer::from_writer(to);
    for route in series {
        let shape = route.values.shape;
        for (t, (&time, row)) in route.values.times.iter().zip(&route.values.rows).enumerate() {
            let mut line = |quantity: &str, i, j, value: f64, error: Option<f64>| {
                writer
                    .serialize(Line {
                        route: route.route.clone(),
                        time,
                        quantity: quantity.into(),
                        i,
                        j,
                        value,
                        standard_error: error.filter(|e| e.is_finite()),
                    })
                    .map_err(failed)
            };
            for (k, quantity) in shape.quantities().enumerate() {
                let error = route.errors.as_ref().map(|e| e.rows[t][k]);
                let (name, i, j) = match quantity {
                    Quantity::Loss => ("loss", None, None),
                    Quantity::Alignment { head, feature } => ("m", Some(head), Some(feature)),
                    Quantity::Overlap { head, other } => ("r", Some(head), Some(other)),
                    Quantity::Bias { head } => ("b", Some(head), None),
                };
                line(name, i, j, row[k], error)?;
            }
            let (trace, error) = route.trace[t];
            line("trace", None, None, trace, Some(error))?;
        }
    }
    writer.flush().map_err(|e| Error::unwritable("series.csv", e))
}

/// Reads a table that [`write_csv`] wrote.
///
/// # Errors
/// Says what is wrong with a table that is truncated or something else altogether.
pub fn read_csv(from: impl Read, place: &str) -> Result<Vec<Series>, Error> {
    let wrong = |problem: String| Error::unreadable(place, problem);
    let mut routes: Vec<String> = Vec::new();
    let mut lines: HashMap<String, Vec<Line>> = HashMap::new();
    for (number, line) in csv::Reader::from_reader(from).into_deserialize::<Line>().enumerate() {
        let line =
            line.map_err(|e| wrong(format!("not a headflow series, or truncated, at line {}: {e}", number + 2)))?;
        if !lines.contains_key(&line.route) {
            routes.push(line.route.clone());
        }
        lines.entry(line.route.clone()).or_default().push(line);
    }
    if routes.is_empty() {
        return Err(wrong("holds no numbers".into()));
    }
    routes.into_iter().map(|route| collect(lines.remove(&route).unwrap_or_default(), route, &wrong)).collect()
}

fn collect(lines: Vec<Line>, route: String, wrong: &dyn Fn(String) -> Error) -> Result<Series, Error> {
    let largest = |quantity: &str, index: fn(&Line) -> Option<usize>| {
        lines.iter().filter(|l| l.quantity == quantity).filter_map(index).max().map_or(0, |i| i + 1)
    };
    let shape = Shape { heads: largest("m", |l| l.i), features: largest("m", |l| l.j) };
    let mut values = Trajectory::new(shape);
    let mut errors = Trajectory::new(shape);
    let mut trace = Vec::new();
    let width = shape.width();
    if shape.heads == 0 || shape.features == 0 || !lines.len().is_multiple_of(width + 1) {
        return Err(wrong(format!("route \"{route}\" is incomplete ({} numbers): the file is truncated", lines.len())));
    }
    for block in lines.chunks(width + 1) {
        let mut row = vec![f64::NAN; width];
        let mut error = vec![f64::NAN; width];
        let mut seen = vec![false; width + 1];
        for line in block {
            let quantity = match (line.quantity.as_str(), line.i, line.j) {
                ("loss", None, None) => Some(Quantity::Loss),
                ("m", Some(head), Some(feature)) => Some(Quantity::Alignment { head, feature }),
                ("r", Some(head), Some(other)) => Some(Quantity::Overlap { head, other }),
                ("b", Some(head), None) => Some(Quantity::Bias { head }),
                ("trace", None, None) => None,
                other => return Err(wrong(format!("route \"{route}\" has an unknown quantity {other:?}"))),
            };
            if line.time != block[0].time {
                return Err(wrong(format!("route \"{route}\" is incomplete at time {}", block[0].time)));
            }
            if !line.value.is_finite() {
                return Err(wrong(format!("route \"{route}\" holds a {} at time {}", line.value, line.time)));
            }
            let index = quantity.map_or(width, |q| shape.index(q).min(width - 1));
            seen[index] = true;
            match quantity {
                Some(_) => {
                    row[index] = line.value;
                    error[index] = line.standard_error.unwrap_or(f64::NAN);
                }
                None => trace.push((line.value, line.standard_error.unwrap_or(f64::NAN))),
            }
        }
        if seen.contains(&false) {
            return Err(wrong(format!("route \"{route}\" is incomplete at time {}", block[0].time)));
        }
        values.times.push(block[0].time);
        values.rows.push(row);
        errors.times.push(block[0].time);
        errors.rows.push(error);
    }
    let known = errors.rows.iter().flatten().any(|e| e.is_finite());
    Ok(Series { route, values, errors: known.then_some(errors), trace })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Vec<Series> {
        let shape = Shape { heads: 2, features: 1 };
        let path = |offset: f64| Trajectory {
            shape,
            times: vec![0.0, 0.1 + 0.2],
            rows: (0..2).map(|t| (0..shape.width()).map(|i| offset + (i + 10 * t) as f64 / 3.0).collect()).collect(),
        };
        let paths = [path(0.0), path(1.0 / 7.0)];
        vec![
            Series::of_estimate("theory", &Estimate::over(&paths).unwrap(), &Estimate::trace_over(&paths)),
            Series::of_trajectory("direct D=500 replica=0", &paths[1]),
        ]
    }

    #[test]
    fn the_table_survives_the_round_trip_bit_for_bit() {
        let mut file = Vec::new();
        write_csv(&example(), &mut file).unwrap();
        assert!(file.starts_with(b"route,time,quantity,i,j,value,standard_error\n"));
        let back = read_csv(&file[..], "series.csv").unwrap();
        for (a, b) in example().iter().zip(&back) {
            assert_eq!((&a.route, &a.values, &a.errors), (&b.route, &b.values, &b.errors));
            assert_eq!(format!("{:?}", a.trace), format!("{:?}", b.trace));
        }
    }

    #[test]
    fn truncated_and_foreign_tables_are_refused() {
        let mut file = Vec::new();
        write_csv(&example(), &mut file).unwrap();
        // Cut anywhere but at the end of a whole route.
        for cut in (0..file.len() - 1).step_by(7) {
            if let Ok(series) = read_csv(&file[..cut], "series.csv") {
                assert!(
                    series
                        .iter()
                        .zip(example())
                        .all(|(a, b)| a.values.rows[..] == b.values.rows[..a.values.rows.len()])
                );
            }
        }
        assert!(read_csv(&file[..file.len() - 30], "series.csv").is_err());
        assert!(read_csv(&b"a,b\n1,2\n"[..], "series.csv").is_err());
        assert!(read_csv(&b""[..], "series.csv").is_err());
    }
}
