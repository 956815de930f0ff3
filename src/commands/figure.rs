//! `headflow figure`: figures from results, computing them first where they are missing.

use std::path::{Path, PathBuf};

use headflow::figures::{self, ResultFolder};
use headflow::model::{Activation, Error};
use headflow::spec::{Purpose, Reader, Spec};
use serde_json::{Map, Value, json};

use super::compare::{code, compare};
use super::{Clock, document, folder, headed, made, names, prepared, print, say};
use super::{dynamics, prune};
use crate::cli::Request;
use crate::progress::writing_result;

pub fn run(request: &Request, spec: &Spec) -> Result<u8, Error> {
    match request.figure.as_deref() {
        Some("comparison") => comparison(request, spec),
        Some("escape") => dynamics::escape(request, spec),
        Some("hierarchy") => dynamics::hierarchy(request, spec),
        Some("spectrum") => dynamics::spectrum(request, spec),
        Some("pruning") => prune::figure(request, spec),
        _ => specialization(request, spec),
    }
}

/// What a figure reads, if it computes; none, if it only draws a result that exists or has flags of its own.
pub fn reader(name: &str) -> Option<Reader> {
    match name {
        "specialization" => Some(Reader {
            figure: Some("specialization"),
            own: &["attention", "bias", "aggregation"],
            ..Purpose::Compare.into()
        }),
        "pruning" => Some(prune::reader()),
        _ => dynamics::reader(name).or_else(|| super::phase::reader(name)),
    }
}

pub fn failed(error: figures::Error) -> Error {
    match error {
        figures::Error::Unwritable { path, source } => Error::unwritable(path.display().to_string(), source),
        other => Error::unreadable("figure", other),
    }
}

fn comparison(request: &Request, spec: &Spec) -> Result<u8, Error> {
    let clock = Clock::start();
    let Some(from) = &request.from else {
        return Err(Error::invalid(
            "from",
            "comparison draws a result that exists: --from FOLDER, which compare, flow or simulate wrote",
        ));
    };
    let folder = ResultFolder::open(from).map_err(failed)?;
    let out = request.out.clone().unwrap_or_else(|| from.clone());
    let _made = made(&out)?;
    let files = figures::comparison(&folder, &out.join("comparison")).map_err(failed)?;
    finish(request, spec, &clock, &out, &files, json!({}))?;
    Ok(0)
}

fn specialization(request: &Request, spec: &Spec) -> Result<u8, Error> {
    let clock = Clock::start();
    let (root, code) = match &request.from {
        Some(from) => (from.clone(), 0),
        None => compute(request, spec, &clock)?,
    };
    if code > 1 {
        return Ok(code);
    }
    let folders: Vec<ResultFolder> = Activation::ALL
        .iter()
        .map(|a| ResultFolder::open(&root.join(a.name())))
        .collect::<Result<_, _>>()
        .map_err(failed)?;
    let out = if request.from.is_some() { request.out.clone().unwrap_or_else(|| root.clone()) } else { root };
    let _made = made(&out)?;
    let files = figures::specialization(&folders, &out.join("specialization")).map_err(failed)?;
    finish(request, spec, &clock, &out, &files, json!({}))?;
    Ok(code)
}

/// One comparison for each activation, in folders of that name.
fn compute(request: &Request, spec: &Spec, clock: &Clock) -> Result<(PathBuf, u8), Error> {
    let mut outer = folder(request, "specialization")?;
    let root = outer.path().to_path_buf();
    let mut worst = 0;
    let mut outcomes = Map::new();
    for activation in Activation::ALL {
        let mut fields = request.fields.clone();
        fields.insert("attention".into(), json!(activation.name()));
        let spec = Spec::completed(&fields, Purpose::Compare)?;
        let path = root.join(activation.name());
        let mut folder = prepared(Some(&path), "compare", request.force)?;
        let (comparison, _) = compare(&spec, &mut folder, request.quiet, activation.name())?;
        if !request.quiet && !request.json {
            say(&format!("{}: {:?}: {}\n", activation.name(), comparison.outcome, comparison.summary));
        }
        outcomes.insert(activation.name().into(), json!(comparison.outcome));
        let code = code(&comparison);
        worst = worst.max(code);
        if code > 1 {
            return Ok((root, worst));
        }
    }
    let _writing = writing_result();
    outer.write_document(&document(
        "figure",
        spec,
        clock,
        json!({"figure": "specialization", "verdicts": outcomes}),
    )?)?;
    Ok((root, worst))
}

pub fn finish(
    request: &Request,
    spec: &Spec,
    clock: &Clock,
    folder: &Path,
    files: &[PathBuf],
    rest: Value,
) -> Result<(), Error> {
    let mut rest = rest;
    if let Some(map) = rest.as_object_mut() {
        map.insert("figure".into(), json!(request.figure));
        map.insert("files".into(), json!(files));
    }
    let result = match &request.from {
        // The result that was drawn has the spec.
        Some(from) => headed("figure", json!({"from": from}), Value::Null, clock, rest)?,
        None => document("figure", spec, clock, rest)?,
    };
    print(request, &result, &format!("{}: {}\n", folder.display(), names(folder, files)));
    Ok(())
}
