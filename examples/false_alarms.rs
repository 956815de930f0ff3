//! How often does `headflow compare` accuse a right theory, and how wrong must a theory be to be found?
//!
//! ```text
//! cargo run --release --example false_alarms -- [EXPERIMENTS] [SPEC]
//! cargo run --release --example false_alarms -- 1000 '{"dimensions": [100, 200, 400], "tau": 60, "records": 16}'
//! ```
//!
//! Simulates EXPERIMENTS (default 24) experiments of `compare` with the overlap chain, one for each seed
//! from that of SPEC on (JSON, as `--spec` reads it; by default the defaults of `compare`), against one
//! integration of the flow. All replicas are independent, so they are also grouped by 4 and by 20, and
//! the last two of three dimensions are also judged alone. Printed are, for each kind of quantity, how many
//! deviations exceed 2, 3 and 4 standard errors; how many experiments exceed the limit that belongs to
//! a false alarm in 3, 10, 30 and 100; what the verdicts were; and how many found theories whose drift,
//! or whose noise alone, is too strong by a factor `1 + x`. Errors are standard errors over experiments: looks of one
//! experiment depend on each other.

use headflow::agreement::{Agreement, Deviation, Measured, Outcome, Row, deviations, engine_deviations, judge};
use headflow::model::{Error, Trajectory, Unwatched, mean_and_error};
use headflow::sims::ensemble::simulate;
use headflow::sims::sgd::{Engine, Start};
use headflow::spec::{Purpose, Spec};
use headflow::theory::flow::{Flow, Options, average};
use statrs::distribution::{ContinuousCDF, Normal};

/// Chances of a false alarm that are measured.
const LEVELS: [f64; 4] = [0.3, 0.1, 0.03, 0.01];
/// Relative errors that are planted.
const PLANTED: [f64; 8] = [0.02, 0.03, 0.05, 0.1, 0.12, 0.15, 0.2, 0.5];

/// One dimension with the replicas of all experiments.
struct Pool {
    dimension: usize,
    runs: Vec<Trajectory>,
}

/// A flow, and the error of its trace.
struct Theory {
    flow: Flow,
    trace_error: Vec<f64>,
}

/// Experiment number `group` of `replicas` replicas at the dimensions of `pools`.
fn experiment<'a>(pools: &'a [Pool], theory: &'a Theory, group: usize, replicas: usize) -> Vec<Measured<'a>> {
    let measured = pools.iter().map(|pool| Measured {
        dimension: pool.dimension,
        simulated: pool.runs[group * replicas..(group + 1) * replicas].iter().collect(),
        predicted: vec![&theory.flow.estimate.mean],
        predicted_error: theory.flow.estimate.standard_error.as_ref(),
        predicted_trace_error: Some(&theory.trace_error),
        scrambles: theory.flow.solutions.len(),
    });
    measured.collect()
}

fn main() -> std::process::ExitCode {
    match measure() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            std::process::ExitCode::from(2)
        }
    }
}

fn measure() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let count = arguments.next().unwrap_or("24".into());
    let experiments: u64 = count.parse().map_err(|_| Error::invalid("EXPERIMENTS", format!("{count} is no number")))?;
    let text = arguments.next().unwrap_or("{}".into());
    let fields = serde_json::from_str(&text).map_err(|e| Error::invalid("SPEC", e.to_string()))?;
    let spec = Spec::from_map(&fields)?.complete(Purpose::Compare)?;
    let start = spec.start()?;

    let points = spec.evaluators()?;
    let integrate = |options: Options| -> Result<Theory, Error> {
        let flow = average(&points, &start, &options, &Unwatched)?;
        Ok(Theory { trace_error: flow.trace.iter().map(|(_, error)| *error).collect(), flow })
    };
    let theory = integrate(spec.flow_options())?;
    let mut pools = Vec::new();
    for dimension in spec.all_dimensions() {
        let mut runs = Vec::new();
        for seed in spec.seed..spec.seed + experiments {
            let spec = Spec { seed, ..spec.clone() };
            let sgd = spec.sgd(dimension, Engine::Overlap)?;
            let ensemble = simulate(&sgd, &Start::Given(start.clone()), &spec.ensemble_options(), &Unwatched)?;
            runs.extend(ensemble.runs.into_iter().map(|run| run.trajectory));
        }
        pools.push(Pool { dimension, runs });
    }
    let subsets: Vec<&[Pool]> = if pools.len() > 2 { vec![&pools[pools.len() - 2..], &pools] } else { vec![&pools] };
    let expected: Vec<String> =
        [2.0, 3.0, 4.0].iter().map(|z| format!("{:.1e}", 2.0 * Normal::standard().sf(*z))).collect();
    println!("stated: beyond 2, 3, 4 at most {}; experiments beyond a limit at most {LEVELS:?}", expected.join(", "));
    for replicas in [4, spec.replicas as usize, 20] {
        let groups = pools[0].runs.len() / replicas;
        for subset in &subsets {
            println!("\nD = {}, {replicas} replicas, {groups} experiments, against theory", dimensions(subset));
            let of = |group: usize| experiment(subset, &theory, group, replicas);
            table(&(0..groups).map(|g| deviations(&of(g))).collect::<Vec<_>>());
            verdicts(&(0..groups).map(|g| judge(&of(g), true)).collect::<Vec<_>>());
        }
        println!("\nD = {}, {replicas} replicas, {} pairs, engine against engine", dimensions(&pools), groups / 2);
        let of = |group: usize| experiment(&pools, &theory, group, replicas);
        table(&(0..groups / 2).map(|g| engine_deviations(&of(2 * g), &of(2 * g + 1))).collect::<Vec<_>>());
    }

    println!("\nfound (D = {}), by relative error in:", dimensions(&pools));
    println!("{:<8}{:>12}{:>18}{:>18}", "error", "replicas", "drift", "noise alone");
    for x in PLANTED {
        // All of the drift times 1 + x: time runs faster by that factor.
        let right = spec.flow_options();
        let times = right.times.iter().map(|t| t * (1.0 + x)).collect();
        let mut faster = integrate(Options { times, ..right.clone() })?;
        faster.flow.estimate.mean.times.clone_from(&right.times);
        let noisier = integrate(Options { noise: right.noise * (1.0 + x), ..right })?;
        for replicas in [spec.replicas as usize, 20] {
            let groups = pools[0].runs.len() / replicas;
            let found = |wrong: &Theory| {
                let disagree = |g: usize| judge(&experiment(&pools, wrong, g, replicas), true).outcome;
                fraction((0..groups).map(|g| f64::from(u8::from(disagree(g) == Outcome::Disagree))))
            };
            println!("{x:<8}{replicas:>12}{:>18}{:>18}", found(&faster), found(&noisier));
        }
    }
    Ok(())
}

fn dimensions(pools: &[Pool]) -> String {
    pools.iter().map(|pool| pool.dimension.to_string()).collect::<Vec<_>>().join(", ")
}

/// A mean over experiments with its standard error; none at all is said with their number.
fn fraction(values: impl Iterator<Item = f64> + Clone) -> String {
    let (mean, error) = mean_and_error(values.clone());
    if mean == 0.0 {
        return format!("0 in {}", values.count());
    }
    format!("{mean:.2e} ± {error:.0e}")
}

/// Rates of large deviations by kind of quantity, and of experiments beyond limits. What is no deviation (at
/// the start) does not count.
fn table(experiments: &[Vec<(Row, Vec<Deviation>)>]) {
    println!("{:<8}{:>14}{:>20}{:>20}{:>20}{:>20}", "", "looks", "mean square", "beyond 2", "beyond 3", "beyond 4");
    for kind in ["loss", "m", "r", "b", "trace"] {
        let looks = |experiment: &[(Row, Vec<Deviation>)]| -> Vec<f64> {
            let of_kind = experiment.iter().filter(|(row, _)| row.quantity == kind);
            of_kind.flat_map(|(_, looks)| looks).map(|d| d.standard_errors.abs()).filter(|d| *d != 0.0).collect()
        };
        let all: Vec<Vec<f64>> = experiments.iter().map(|e| looks(e)).filter(|l| !l.is_empty()).collect();
        if all.is_empty() {
            continue;
        }
        let mean = |of: &dyn Fn(f64) -> f64| {
            fraction(all.iter().map(|l| l.iter().map(|d| of(*d)).sum::<f64>() / l.len() as f64))
        };
        let beyond = |limit: f64| mean(&|d| f64::from(u8::from(d > limit)));
        println!(
            "{kind:<8}{:>14}{:>20}{:>20}{:>20}{:>20}",
            all.iter().map(Vec::len).sum::<usize>(),
            mean(&|d| d * d),
            beyond(2.0),
            beyond(3.0),
            beyond(4.0)
        );
    }
    let largest: Vec<(f64, usize)> = experiments
        .iter()
        .map(|e| {
            let looks = || e.iter().flat_map(|(_, looks)| looks).map(|d| d.standard_errors.abs());
            (looks().fold(0.0, f64::max), looks().filter(|d| *d != 0.0).count())
        })
        .collect();
    let rates = LEVELS.map(|level| {
        let limit = |looks: usize| Normal::standard().inverse_cdf(level / 2.0 / looks as f64).abs();
        format!("{level}: {}", fraction(largest.iter().map(|(z, n)| f64::from(u8::from(*z > limit(*n))))))
    });
    println!("experiments beyond the limit for {}", rates.join(", "));
}

fn verdicts(verdicts: &[Agreement]) {
    let count = |outcome| verdicts.iter().filter(|v| v.outcome == outcome).count();
    let (agree, disagree) = (count(Outcome::Agree), count(Outcome::Disagree));
    println!("verdicts: {agree} agree, {disagree} disagree, {} undetermined", count(Outcome::Undetermined));
}
