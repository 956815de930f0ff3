//! `headflow stages`: plateaus, patterns and the order of learning, of a flow, of simulated replicas, or
//! of results that exist.

use std::collections::BTreeMap;

use headflow::figures::ResultFolder;
use headflow::model::series::{Series, read_csv};
use headflow::model::{Error, Trajectory};
use headflow::spec::Spec;
use headflow::theory::stages::{Stages, stages};
use serde_json::{Map, Value, json};

use super::flow::{advised, ended, integrate};
use super::simulate::{replicas, route_name, series, simulate};
use super::{Clock, document, ensemble_route, exit_code, folder, print, theory_route};
use crate::cli::Request;
use crate::progress::writing_result;

/// What the stages of one route are in the document.
pub fn entry(route: &str, found: &Stages) -> Value {
    let mut value = json!(found);
    value["route"] = json!(route);
    value
}

pub fn run(request: &Request, spec: &Spec) -> Result<u8, Error> {
    match &request.from {
        Some(from) => read(request, from),
        None if spec.engine.is_some() => simulated(request, spec),
        None => flow(request, spec),
    }
}

/// Fields that say what is looked for in results that exist.
pub const OF_RESULTS: [&str; 3] = ["on", "motion", "contrast"];

/// The stages of every route in a result folder.
fn read(request: &Request, from: &std::path::Path) -> Result<u8, Error> {
    let clock = Clock::start();
    if request.out.is_some() {
        return Err(Error::invalid("out", "nothing is written when results are read (--from); leave it out"));
    }
    // The same checks as for a figure; then the spec and the table in full.
    ResultFolder::open(from).map_err(|e| Error::unreadable("stages", e))?;
    let header = from.join("result.json");
    let place = header.display().to_string();
    let text =
        std::fs::read_to_string(&header).map_err(|e| Error::unreadable(&place, format!("cannot be read: {e}")))?;
    let result: Value = serde_json::from_str(&text).map_err(|e| Error::unreadable(&place, e))?;
    let Some(Value::Object(mut fields)) = result.get("spec").cloned() else {
        return Err(Error::unreadable(&place, "holds no spec"));
    };
    fields.remove("at");
    fields.extend(request.fields.clone());
    let spec = Spec::from_map(&fields)?;
    spec.criteria().validate()?;
    let table = from.join("series.csv");
    let place = table.display().to_string();
    let file = std::fs::File::open(&table).map_err(|e| Error::unreadable(&place, format!("cannot be read: {e}")))?;
    let all = read_csv(std::io::BufReader::new(file), &place)?;
    let (mut text, mut entries) = (String::new(), Vec::new());
    for route in &all {
        let found = match stages(&route.values, &spec.theta.second_moment(), &spec.criteria()) {
            Ok(found) => found,
            // Routes that have stages are told all the same, unless this was the last chance.
            Err(error) if entries.is_empty() && route.route == all[all.len() - 1].route => {
                return Err(Error::unreadable(format!("{place}, route \"{}\"", route.route), error));
            }
            Err(error) => {
                text += &format!("{}: {error}\n", route.route);
                continue;
            }
        };
        text += &format!("{}\n{}", route.route, found.describe());
        if !route.route.contains("replica") && route.route != "theory" {
            text += "(a mean over replicas: it blurs what they do at different times; see the replica)\n";
        }
        entries.push(entry(&route.route, &found));
    }
    let result = document("stages", &spec, &clock, json!({"stages": entries, "from": from}))?;
    print(request, &result, &text);
    Ok(0)
}

fn flow(request: &Request, spec: &Spec) -> Result<u8, Error> {
    let clock = Clock::start();
    let mut folder = folder(request, "stages")?;
    let evaluators = spec.evaluators()?;
    let flow = integrate(&evaluators, &spec.start()?, &spec.flow_options(), "flow", request.quiet)?;
    if !flow.stop.is_whole() {
        return Err(flow.stop.error("flow"));
    }
    let found = stages(&flow.estimate.mean, &spec.theta.second_moment(), &spec.criteria())?;
    let settled = ended(spec, &evaluators, &flow);
    let writing = writing_result();
    let route = theory_route("theory", &flow.estimate, &flow.stop, flow.solutions.len(), flow.statistics);
    let rest = json!({"stop": flow.stop, "settled": settled, "routes": [route], "stages": [entry("theory", &found)]});
    let result = document("stages", spec, &clock, rest)?;
    folder.write_run(&[Series::of_estimate("theory", &flow.estimate, &flow.trace)], &[], &result)?;
    drop(writing);
    let text = format!(
        "{}{}{}: result.json, series.csv, series.npz\n",
        found.describe(),
        advised(settled.as_ref(), &flow.stop),
        folder.path().display()
    );
    print(request, &result, &text);
    Ok(exit_code(&flow.stop))
}

/// The stages of each replica, and how often each outcome occurs.
fn simulated(request: &Request, spec: &Spec) -> Result<u8, Error> {
    let clock = Clock::start();
    let mut folder = folder(request, "stages")?;
    let dimension = spec.dimension.ok_or_else(|| Error::invalid("dimension", "is missing"))?;
    let sgd = spec.sgd(dimension, spec.engines()[0])?;
    let ensemble = simulate(spec, &sgd, &spec.simulation_start()?, request.quiet)?;
    let name = route_name(&sgd);
    if !ensemble.stop.as_requested() {
        return Err(ensemble.stop.error("simulation"));
    }
    let paths: Vec<&Trajectory> = ensemble.runs.iter().map(|run| &run.trajectory).collect();
    let (summary, entries) = tally(spec, &name, &paths)?;
    let writing = writing_result();
    let rest = json!({
        "stop": ensemble.stop,
        "routes": [ensemble_route(&name, dimension, &ensemble)],
        "stages": entries,
        "summary": summary,
    });
    let result = document("stages", spec, &clock, rest)?;
    folder.write_run(&series(&name, &ensemble), &[replicas(&name, &ensemble)], &result)?;
    drop(writing);
    let text = format!(
        "{}{}: result.json, series.csv, series.npz\n",
        describe(&name, &summary, entries.first()),
        folder.path().display()
    );
    print(request, &result, &text);
    Ok(exit_code(&ensemble.stop))
}

/// A pattern set that does not depend on the order of the heads.
fn outcome(found: &Stages) -> String {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for pattern in found.last_patterns() {
        *counts.entry(pattern.to_string()).or_default() += 1;
    }
    let parts: Vec<String> =
        counts.iter().map(|(p, n)| if *n > 1 { format!("{n} x {p}") } else { p.clone() }).collect();
    parts.join(", ")
}

/// Each replica's stages, and the fractions of outcomes and of orders of learning.
pub fn tally(spec: &Spec, name: &str, paths: &[&Trajectory]) -> Result<(Value, Vec<Value>), Error> {
    let mut outcomes: BTreeMap<String, usize> = BTreeMap::new();
    let mut orders: BTreeMap<String, usize> = BTreeMap::new();
    let (mut entries, mut unclear) = (Vec::new(), Vec::new());
    let mut excursions = 0;
    let mut first = None;
    for (index, path) in paths.iter().enumerate() {
        // One replica that is still moving does not spoil the table of all.
        match stages(path, &spec.theta.second_moment(), &spec.criteria()) {
            Ok(found) => {
                *outcomes.entry(outcome(&found)).or_default() += 1;
                let order: Vec<String> = found.order.iter().map(|l| format!("s{}", l.feature + 1)).collect();
                *orders.entry(if order.is_empty() { "none".into() } else { order.join(" then ") }).or_default() += 1;
                excursions += usize::from(!found.excursions.is_empty());
                entries.push(entry(&format!("{name} replica={index}"), &found));
            }
            // None of them has stages: what keeps the first from it is the answer.
            Err(error) if entries.is_empty() && index + 1 == paths.len() => return Err(first.unwrap_or(error)),
            Err(error) => {
                unclear.push(json!({"replica": index, "problem": error.to_string()}));
                first.get_or_insert(error);
            }
        }
    }
    let to_list = |counts: BTreeMap<String, usize>| -> Vec<Value> {
        let mut list: Vec<_> = counts.into_iter().collect();
        list.sort_by_key(|(_, n)| std::cmp::Reverse(*n));
        list.into_iter().map(|(what, count)| json!({"what": what, "count": count})).collect()
    };
    let summary = json!({
        "replicas": paths.len(),
        "outcomes": to_list(outcomes),
        "orders": to_list(orders),
        "with_excursions": excursions,
        "unclear": unclear,
    });
    Ok((summary, entries))
}

fn describe(name: &str, summary: &Value, first: Option<&Value>) -> String {
    let replicas = summary["replicas"].as_u64().unwrap_or(0);
    let mut text = format!("{name}, {replicas} replicas\n");
    for (title, field) in [("last patterns (any order of heads)", "outcomes"), ("order of learning", "orders")] {
        text += &format!("{title}\n");
        for line in summary[field].as_array().into_iter().flatten() {
            let count = line["count"].as_u64().unwrap_or(0);
            text += &format!("  {:>4} of {replicas}  {}\n", count, line["what"].as_str().unwrap_or_default());
        }
    }
    text += &format!("with excursions: {} of {replicas}\n", summary["with_excursions"]);
    for line in summary["unclear"].as_array().into_iter().flatten() {
        text += &format!("unclear: replica {}: {}\n", line["replica"], line["problem"].as_str().unwrap_or_default());
    }
    let stages: Option<(String, Stages)> = first.and_then(|value| {
        let mut fields: Map<String, Value> = value.as_object().cloned().unwrap_or_default();
        // Not always replica 0: the first that has stages.
        let route = fields.remove("route")?;
        let replica = route.as_str()?.rsplit_once("replica=")?.1.to_string();
        Some((replica, serde_json::from_value(Value::Object(fields)).ok()?))
    });
    if let Some((replica, stages)) = stages {
        text += &format!("replica {replica}\n{}", stages.describe());
    }
    text
}

#[cfg(test)]
mod tests {
    use headflow::model::{Quantity, Shape};

    use super::*;

    /// The table that is shown is that of the first replica with stages, under its own number.
    #[test]
    fn the_replica_that_is_shown_has_its_own_number() {
        let spec = Spec { theta: headflow::model::Theta::Flip { nu: vec![2.0] }, ..Spec::default() };
        let shape = Shape { heads: 2, features: 1 };
        let path = |moving: f64| {
            let mut path = Trajectory::new(shape);
            for t in 0..40 {
                let mut row = vec![0.0; shape.width()];
                let m = 1.0 + moving * f64::from(t);
                for head in 0..2 {
                    row[shape.index(Quantity::Alignment { head, feature: 0 })] = if head == 0 { m } else { -m };
                    for other in 0..2 {
                        row[shape.index(Quantity::Overlap { head, other })] =
                            if head == other { m * m } else { -m * m };
                    }
                }
                path.times.push(f64::from(t));
                path.rows.push(row);
            }
            path
        };
        let (moving, settled) = (path(0.5), path(0.0));
        let (summary, entries) = tally(&spec, "overlap D=100", &[&moving, &settled, &settled]).unwrap();
        assert_eq!(summary["unclear"][0]["replica"], 0);
        let text = describe("overlap D=100", &summary, entries.first());
        assert!(text.contains("\nreplica 1\n") && !text.contains("\nreplica 0\n"), "{text}");
    }
}
