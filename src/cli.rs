//! The command line: commands, flags and help. Every field of a spec is a flag, from the one table
//! in [`headflow::spec::FIELDS`].

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, Command};
use headflow::model::{Cost, Error};
use headflow::phase::Quantity;
use headflow::spec::{FIELDS, Field, Purpose, Reader, Spec, commands, count, overlay, parse_flag};
use serde_json::{Map, Value};

const ABOUT: &str = "Attention heads that specialise: theory meets simulation";

const LONG_ABOUT: &str = "\
Attention heads that specialise: theory meets simulation.

One token of L carries a signal in F hidden directions; H attention heads learn to find it by online SGD. \
As D grows, the learning follows an ordinary differential equation for the alignments m and the overlaps r. \
headflow integrates that flow, simulates the SGD at finite D, and shows that they agree.";

const EXAMPLES: &str = "\
Examples:
  headflow compare                                   theory against SGD: a figure and a verdict
  headflow compare --attention bayes-softmax         the same for another activation
  headflow flow --gamma 0 --tau 100 --theta flip:2.5,2
  headflow simulate --dimension 2000 --replicas 4 --initial random
  headflow prune --initial random --replicas 20 --attention softmax1
  headflow loss --theta flip:2 --length 5 --m \"1.5;-1.2\" --r \"2.55,-1.75;-1.75,1.64\"
  headflow flow --print-spec > spec.json             then edit it, and
  headflow flow --spec spec.json --out my-flow

Every run writes a folder (default results/COMMAND, then results/COMMAND-2, ...) with result.json, series.csv, \
series.npz and figures.
Exit codes: 0 done, 1 theory and simulation disagree, 2 bad input or a run that failed, 130 interrupted.";

/// What was asked for.
pub struct Request {
    /// The command.
    pub command: String,
    /// The spec's fields that were given, by file and flags.
    pub fields: Map<String, Value>,
    /// The result folder.
    pub out: Option<PathBuf>,
    /// Replace a result.
    pub force: bool,
    /// Print the result document alone.
    pub json: bool,
    /// Print the spec and stop.
    pub print_spec: bool,
    /// Print nothing but errors.
    pub quiet: bool,
    /// Number of threads.
    pub threads: Option<usize>,
    /// The most bytes that a run may hold.
    pub memory: f64,
    /// `figure`: its name.
    pub figure: Option<String>,
    /// `figure`, `stages`: where the results are.
    pub from: Option<PathBuf>,
    /// `simulate`, `phase`, `figure`: the folder of an unfinished run.
    pub resume: Option<PathBuf>,
    /// `phase`: the parameter across.
    pub x: Option<String>,
    /// `phase`: the parameter upwards.
    pub y: Option<String>,
    /// `phase`: what is computed.
    pub quantity: Option<String>,
    /// `xsa`: what was given, by the names of [`XSA`].
    pub xsa: BTreeMap<&'static str, String>,
}

/// The flags of `xsa bias` and `xsa measure`: name, value, help.
pub const XSA: [(&str, &str, &str); 11] = [
    ("model", "FILE", "A model of the llama architecture in a GGUF file"),
    ("text", "FILE", "The text to measure, in a file of UTF-8"),
    ("tokens", "FILE", "The token ids to measure, in a JSON file: a list, or an object whose \"tokens\" is one"),
    ("rho", "RANGE", "Correlations of values, as FROM:TO:COUNT, log:FROM:TO:COUNT or V1,V2,... [default: 0:0.9:16]"),
    ("self_attention", "RANGE", "Weights on oneself to aim at, likewise, between 0 and 1 [default: log:0.01:0.9:16]"),
    ("lengths", "LIST", "Lengths of sequences, a map each [default: 16,128,1024]"),
    ("sequences", "N", "Independent sequences a cell [default: 8]"),
    ("key_size", "N", "Numbers in a query or key [default: 128]"),
    ("value_size", "N", "Numbers in a value [default: 128]"),
    ("spread", "S", "Standard deviation of the random part of scores [default: 1]"),
    ("seed", "N", "Seed of all random numbers [default: 0]"),
];

fn xsa_flags(names: &[&str]) -> Vec<Arg> {
    let flags = XSA.iter().filter(|(name, _, _)| names.contains(name));
    let flag = |(name, value, help): &(&'static str, &'static str, &'static str)| {
        Arg::new(*name).long(name.replace('_', "-")).value_name(*value).help(*help).allow_hyphen_values(true)
    };
    flags.map(flag).chain(run_flags()).collect()
}

/// The most threads.
const MAX_THREADS: usize = 1024;

/// The most GiB of memory.
const MAX_MEMORY: f64 = 1e6;

/// Names of figures.
pub const FIGURES: [&str; 13] = [
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

/// The flags of a spec, those that `reader` never reads last; a figure's all alike.
fn spec_flags(reader: Option<Purpose>) -> Vec<Arg> {
    let may_read = |field: &&Field| reader.is_none_or(|purpose| Reader::from(purpose).may_read(field));
    let file = Arg::new("spec").long("spec").value_name("FILE").help("Read a spec from a JSON file; flags override it");
    let print = Arg::new("print_spec")
        .long("print-spec")
        .action(ArgAction::SetTrue)
        .help("Print the spec that this command line means, and stop");
    let flag = |field: &Field| {
        Arg::new(field.name)
            .long(field.name.replace('_', "-"))
            .value_name(field.name.to_uppercase())
            .allow_hyphen_values(true)
    };
    let read = FIELDS.iter().filter(may_read).map(|field| flag(field).help(field.help).help_heading(field.group));
    let unread = FIELDS
        .iter()
        .filter(|field| !may_read(field))
        .map(|field| flag(field).help(format!("Read by {}", commands(field).join(", "))).help_heading("Refused here"));
    [file, print].into_iter().chain(read).chain(unread).collect()
}

fn run_flags() -> [Arg; 2] {
    [
        Arg::new("out").long("out").value_name("FOLDER").help("Write the results there [default: results/COMMAND]"),
        Arg::new("force").long("force").action(ArgAction::SetTrue).help("Replace a result that the folder holds"),
    ]
}

fn command(name: &'static str, about: &'static str, long: &'static str, examples: &'static str) -> Command {
    Command::new(name).about(about).long_about(format!("{about}.\n\n{long}")).after_help(examples)
}

/// The whole command line.
pub fn build() -> Command {
    Command::new("headflow")
        .version(headflow::VERSION)
        .long_version(format!("{} ({})", headflow::VERSION, headflow::GIT_REVISION))
        .about(ABOUT)
        .long_about(LONG_ABOUT)
        .after_help(EXAMPLES)
        .subcommand_required(true)
        .arg_required_else_help(true)
        .args([
            Arg::new("json")
                .long("json")
                .global(true)
                .action(ArgAction::SetTrue)
                .help("Print the result document, alone, on standard output"),
            Arg::new("quiet").long("quiet").short('q').global(true).action(ArgAction::SetTrue).help("Print nothing but errors"),
            Arg::new("threads").long("threads").value_name("N").global(true).help(
                "Threads to use; the numbers do not depend on it [default: all cores]",
            ),
            Arg::new("memory").long("memory").value_name("GIB").global(true).allow_hyphen_values(true).help(
                "Memory that a run may need; one that needs more is refused before it begins [default: 1.5]",
            ),
        ])
        .subcommand(
            command(
                "compare",
                "Compare theory and SGD: a figure, a table and a verdict",
                "Integrates the flow and runs SGD at two or more dimensions from the same start, by both engines (tokens \
                 in D dimensions, and the exact overlap chain), and asks whether what differs from theory is a bias of \
                 order 1/D, as it must be for a correct theory, and whether the two engines have one law at each D. With \
                 random keys the flow and the chain start from each replica's own overlaps.",
                "Examples:\n  headflow compare\n  headflow compare --dimensions 250,500,1000 --replicas 16\n  \
                 headflow compare --engine overlap --dimensions 10000,100000 --tau 20\n  \
                 headflow compare --attention softmax1 --gamma 0.5 --tau 100",
            )
            .args(spec_flags(Some(Purpose::Compare)))
            .args(run_flags()),
        )
        .subcommand(
            command(
                "flow",
                "Integrate the flow of the order parameters (theory, D to infinity)",
                "Population averages by randomised quasi-Monte Carlo; one solve for each scramble gives the standard \
                 errors. gamma = 0 is gradient flow.",
                "Examples:\n  headflow flow --gamma 0 --theta flip:3,2 --tau 60\n  headflow flow --times 0,10,20,40 --json\n  \
                 headflow flow --stop-loss 0.7\n  headflow flow --stop-alignment 0,1,0.5",
            )
            .args(spec_flags(Some(Purpose::Flow)))
            .args(run_flags()),
        )
        .subcommand(
            command(
                "simulate",
                "Run online SGD at dimension D, several replicas in parallel",
                "Fresh tokens every step, the exact gradient at finite D; overlaps and loss are recorded on a time grid. \
                 The engine \"overlap\" simulates the order parameters alone: the same law at any D, a step costs the \
                 same at D = 10^3 and 10^9. Its long runs are kept in checkpoint.json every 20 s and when interrupted; \
                 --resume goes on from there and gives the same bits as an unbroken run.",
                "Examples:\n  headflow simulate --dimension 1000 --tau 100\n  headflow simulate --initial random --replicas 20\n  \
                 headflow simulate --engine overlap --dimension 1000000 --tau 20\n  headflow simulate --resume results/simulate\n  \
                 headflow simulate --batch 8 --gamma 2",
            )
            .arg(
                Arg::new("resume")
                    .long("resume")
                    .value_name("FOLDER")
                    .help("Go on with the interrupted run in this folder (engine overlap)"),
            )
            .args(spec_flags(Some(Purpose::Simulate)))
            .args(run_flags()),
        )
        .subcommand(
            command(
                "stability",
                "Growth rates at stationary points, what grows, and when it leaves",
                "Eigenvalues of minus the Hessian of the population loss in the coordinates (m, C, b), with what each mode \
                 does: symmetric or specialising (sum_h dk_h = 0), and along which feature.\n\
                 --at unspecialised (default): at k = 0, and at the fixed point where all heads are equal, found by a root \
                 solve, without and with the noise that the learning rate gamma adds; with escape times for random keys.\n\
                 --at point: at m, r, b, which must be stationary.\n\
                 --at plateaus: at the stationary points beside the plateaus of the flow from m0, r0, with the time at which \
                 the next feature is predicted to be learned.\nWrites a folder only with --out.",
                "Examples:\n  headflow stability\n  headflow stability --attention bayes-softmax --gamma 4 --dimensions 1000,1000000\n  \
                 headflow stability --at plateaus --gamma 0 --key-scale 0.1 --theta flip:1.8,1.5\n  \
                 headflow stability --theta flip:2 --heads 2 --length 5 --m \"0;0\" --r \"0,0;0,0\"",
            )
            .args(spec_flags(Some(Purpose::Stability)))
            .args(run_flags()),
        )
        .subcommand(
            command(
                "stages",
                "Plateaus, the pattern of each head on them, and the order of learning",
                "Of the flow (default), of every replica of a simulation (--engine direct or overlap, with a table of how \
                 often each outcome occurs), or of results that exist (--from). A head is \"+s1 -s2\" when it is on in the \
                 first feature with sign + and in the second with sign -, and off when it is on in none; s1 is feature 0.",
                "Examples:\n  headflow stages --attention bayes-softmax\n  \
                 headflow stages --engine overlap --dimension 100000 --replicas 20 --initial random --attention bayes-softmax\n  \
                 headflow stages --from results/compare",
            )
            .arg(Arg::new("from").long("from").value_name("FOLDER").help("Read the trajectories in this result folder"))
            .args(spec_flags(Some(Purpose::Stages)))
            .args(run_flags()),
        )
        .subcommand(
            command(
                "phase",
                "A number over two parameters: a phase diagram",
                "--x and --y are any two numeric fields of a spec, as FIELD=FROM:TO:COUNT, FIELD=log:FROM:TO:COUNT or \
                 FIELD=V1,V2,... (drawn logarithmically where its logarithms are evenly spaced); theta.nu sets every entry of nu, theta.nu[1] its second, theta.scale multiplies all of theta. \
                 Whichever axis they are on, the whole part is set before its entry, and the scale multiplies what both have set.\n\
                 Cells are computed in parallel, kept in checkpoint.json every few seconds and when interrupted; headflow phase \
                 --resume FOLDER, without more, goes on and gives the same numbers. Failed cells are left blank and listed; those of flows that had not settled are hatched over their colour and listed.",
                "Examples:\n  headflow phase --x theta.nu=0.5:4:20 --y length=log:4:1e6:12 --heads 2 --theta flip:1\n  \
                 headflow phase --quantity regret --x theta.scale=0.5:2:10 --y heads=1:4:4 --attention softmax1\n  \
                 headflow phase --quantity bayes-risk --x theta.mean=0:3:30 --y theta.sd=0:3:30 --theta gaussian:mean=0:sd=1\n  \
                 headflow phase --quantity stages --x theta.nu[1]=0.5:2:4 --y length=4,6,10 --gamma 0 --points 1024",
            )
            .arg(Arg::new("x").long("x").value_name("RANGE").help("The parameter across, like theta.nu=0.5:4:40"))
            .arg(Arg::new("y").long("y").value_name("RANGE").help("The parameter upwards, like length=log:10:1e6:20"))
            .arg(Arg::new("quantity").long("quantity").value_name("NAME").help(format!(
                "{} [default: optimal-loss]",
                Quantity::ALL.map(Quantity::name).join(" | ")
            )))
            .arg(Arg::new("resume").long("resume").value_name("FOLDER").help("Go on with the unfinished diagram in this folder"))
            .args(spec_flags(None))
            .args(run_flags()),
        )
        .subcommand(
            command(
                "prune",
                "Remove heads after training: the loss against their number",
                "Trains first: the flow (default; with --initial random one for each of --replicas draws of keys in \
                 --dimension dimensions), or every replica of a simulation (--engine direct or overlap). With --m, --r, --b \
                 it takes that point as it is. Then sets of heads go and the others stay fixed: mean divides by the heads left, \
                 bayes-softmax normalises over them, sum just lacks the others. All sets of each size are taken, or --subsets \
                 random ones.\n\
                 Heads that can go, at a tolerance (a fraction of the loss that they may cost): by choice, the largest number for \
                 which, up to it, the best set is within it; together, the largest number whose best set is, whatever fewer \
                 cost; at random, as by choice with the mean over sets; beside it H - F and, where theta has finite support, H - |support|. \
                 Losses are population losses of the limit at the trained overlaps, for simulations too.",
                "Examples:\n  headflow prune --heads 6 --theta gaussian:mean=0,0:sd=2,2 --attention softmax1 --initial random --replicas 20\n  \
                 headflow prune --engine direct --dimension 300 --initial random --heads 8 --theta flip:2,2 --replicas 20\n  \
                 headflow prune --theta flip:2 --m \"1.5;-1.2;1.4\" --prune-tolerances 0.001,0.01 --json",
            )
            .args(spec_flags(Some(Purpose::Prune)))
            .args(run_flags()),
        )
        .subcommand(
            command(
                "loss",
                "Population loss and its parts at given m, r, b",
                "E = 1 - 2 E[a_eps] + E[sum_l a_l^2]: by quadrature, to --tolerance and at any length (default), or by quasi-Monte \
                 Carlo with standard errors over scrambles (--evaluator qmc). Writes a folder only with --out.",
                "Examples:\n  headflow loss --theta flip:2 --length 5 --m \"1.5;-1.2\"\n  \
                 headflow loss --theta flip:8 --length 1000000000 --m \"7.5;-7.5\" --attention softmax1 --b=-28,-28 --tolerance 1e-11\n  \
                 headflow loss --theta flip:2 --m \"1.5;-1.2\" --evaluator qmc\n  headflow loss --spec point.json --json",
            )
            .args(spec_flags(Some(Purpose::Loss)))
            .args(run_flags()),
        )
        .subcommand(
            command(
                "bayes",
                "The Bayes risk: the least loss of any attention",
                "1 - E[p_eps] with the posterior p_l of the relevant token, by quadrature, at any length; checked by the identity \
                 E[sum_l p_l^2] = E[p_eps]. Beside it the loss that each activation cannot pass with --heads heads: softmax with \
                 mean stays above L / (4 (L - 1)) for symmetric theta. Writes a folder only with --out.",
                "Examples:\n  headflow bayes --theta flip:2 --length 5\n  \
                 headflow bayes --theta gaussian:mean=1,0:sd=0.5,2 --length 1000000 --json\n  \
                 headflow bayes --theta sphere:nu=4:features=5 --tolerance 1e-12",
            )
            .args(spec_flags(Some(Purpose::Bayes)))
            .args(run_flags()),
        )
        .subcommand(
            command(
                "optimum",
                "The lowest population loss of --heads heads, and the keys that have it",
                "Descends from --starts random keys and biases (limited-memory BFGS), by quadrature (default) or on fixed points \
                 (--evaluator qmc: quicker for many heads, exact to its own error). Lists the distinct minima and how often each was \
                 found. The lowest of many is no proof that there is none lower. Writes a folder only with --out.",
                "Examples:\n  headflow optimum --theta flip:2 --heads 2 --length 5\n  \
                 headflow optimum --attention bayes-softmax --heads 4 --theta flip:1.8,1.5\n  \
                 headflow optimum --attention softmax1 --heads 2 --theta flip:5 --length 100000 --starts 6 --json",
            )
            .args(spec_flags(Some(Purpose::Optimum)))
            .args(run_flags()),
        )
        .subcommand(
            command(
                "xsa",
                "Exclusive self-attention: the bias that it removes, on synthetic values and in language models",
                "Attention outputs y_i resemble the token's own value v_i: cos(y_i, v_i) is the attention similarity bias. \
                 Exclusive self-attention (XSA) removes that part: z_i = y_i - (y_i . v_i / |v_i|^2) v_i.",
                "Examples:\n  headflow xsa bias\n  headflow xsa measure --model FILE.gguf --text FILE",
            )
            .subcommand_required(true)
            .arg_required_else_help(true)
            .subcommand(
                command(
                    "measure",
                    "Measure the bias of every head of a language model on a text",
                    "Runs the model in single precision and gives for every layer and head, as averages over positions (position 0 \
                     is left out: it sees only itself): cos(y_i, v_i), a_ii, sum_j a_ij^2, the attention on the first token, the \
                     fraction of |y_i|^2 that XSA removes, the correlation rho of values, controls, and how well the closed form \
                     predicts the bias; with perplexities as trained and with XSA switched on. \
                     Needs a program with the feature gguf: cargo build --release --features gguf.",
                    "Examples:\n  headflow xsa measure --model model.gguf --text book.txt\n  \
                     headflow xsa measure --model model.gguf --tokens ids.json --json",
                )
                .args(xsa_flags(&["model", "text", "tokens"])),
            )
            .subcommand(
                command(
                    "bias",
                    "Map the bias of synthetic attention over value correlation, self attention and length",
                    "Correlated Gaussian values, v_j = sqrt(rho) u + sqrt(1 - rho) w_j, under random scores with a preference \
                     for oneself: measured cosines in colour, the closed form's as lines.",
                    "Examples:\n  headflow xsa bias\n  headflow xsa bias --lengths 64 --rho 0:0.5:6 --self-attention 0.1,0.5,0.9 --json",
                )
                .args(xsa_flags(&[
                    "rho",
                    "self_attention",
                    "lengths",
                    "sequences",
                    "key_size",
                    "value_size",
                    "spread",
                    "seed",
                ])),
            ),
        )
        .subcommand(
            command(
                "figure",
                "Draw a figure, from results that exist (--from) or by computing them",
                "comparison: theory and SGD of one result folder (--from is required).\n\
                 specialization: heads against time for the three activations, theory and SGD together; without --from \
                 the three comparisons are computed first, into folders of their own.\n\
                 escape: time at which the overlap chain leaves the unspecialised state against ln D, 10^2 to 10^7, beside the \
                 slope 1 / (2 kappa) from the spectrum, and the time of the unspecialised phase for a theta with non-zero \
                 mean (some minutes).\n\
                 hierarchy: alignments with three features of decreasing variance, flow and chain, plateaus shaded, \
                 predicted times marked.\n\
                 spectrum: growth rates along a flow.\n\
                 pruning: loss against the number of removed heads, for the three activations, an isotropic Gaussian theta and \
                 flips, after flows and after direct SGD from random keys (some minutes).\n\
                 retrieval: Bayes risk and optimal losses over nu / sqrt(2 ln L) and log10 L up to 10^9 (flips, F = 1, H = 2).\n\
                 heads: regret to Bayes over nu and H for the three activations (two flips: one head for each support point).\n\
                 specialised: where the unspecialised point is stable, over mean and spread of theta.\n\
                 stages: softmax, H = 4, two flips: where the second stage of specialization exists, over nu and L.\n\
                 activations: optimal loss against nu for the three activations.\n\
                 These five are phase diagrams, resumable like those of phase.\n\
                 xsa-bias: the attention similarity bias of synthetic values, as xsa bias (without flags of its own).\n\
                 xsa-model: that of a language model, from a result of xsa measure (--from is required).\n\
                 All but comparison, specialization and these two compute a run with defaults of their own, any field of which can be given, into a folder; \
                 --from draws it again.",
                "Examples:\n  headflow figure comparison --from results/compare\n  headflow figure specialization\n  \
                 headflow figure escape\n  headflow figure hierarchy --attention softmax1\n  \
                 headflow figure spectrum --from results/spectrum\n  \
                 headflow figure pruning --replicas 40\n  \
                 headflow figure specialization --tau 100 --dimensions 500 --out my-figure",
            )
            .arg(Arg::new("figure").value_name("NAME").required(true).help(FIGURES.join(" | ")))
            .arg(Arg::new("from").long("from").value_name("FOLDER").help("Draw from the results in this folder"))
            .arg(Arg::new("resume").long("resume").value_name("FOLDER").help("Go on with the unfinished diagram in this folder"))
            .args(spec_flags(None))
            .args(run_flags()),
        )
        .subcommand(command(
            "doctor",
            "Say what this machine offers: cores, SIMD, memory, versions",
            "Also checks the random generator against known answers.",
            "Example:\n  headflow doctor --json",
        ))
}

/// Reads the command line.
///
/// # Errors
/// Names the flag or field that is wrong.
pub fn request(matches: &ArgMatches) -> Result<Request, Error> {
    let (command, matches) = matches.subcommand().unwrap_or(("doctor", matches));
    let (command, matches) = match matches.subcommand() {
        Some((below, matches)) => (format!("{command} {below}"), matches),
        None => (command.to_string(), matches),
    };
    let text = |name: &str| matches.try_get_one::<String>(name).ok().flatten().cloned();
    let flag = |name: &str| matches.try_get_one::<bool>(name).ok().flatten().copied().unwrap_or(false);
    let mut fields = match text("spec") {
        Some(file) => {
            let content =
                std::fs::read_to_string(&file).map_err(|e| Error::unreadable(&file, format!("cannot be read: {e}")))?;
            Spec::from_json(&content, &file)?
        }
        None => Map::new(),
    };
    let mut flags = Map::new();
    for field in FIELDS {
        if let Some(value) = text(field.name) {
            flags.insert(field.name.into(), parse_flag(field, &value)?);
        }
    }
    let reader = crate::commands::reader(&command, text("figure").as_deref(), text("quantity").as_deref())?;
    // Where nobody reads them, all are refused.
    overlay(&mut fields, flags, reader.map_or(Purpose::Flow, |reader| reader.purpose));
    for name in ["out", "from", "resume", "model", "text", "tokens"] {
        if text(name).is_some_and(|path| path.is_empty()) {
            return Err(Error::invalid(name, "the name is empty"));
        }
    }
    let threads = text("threads")
        .map(|t| match count(&t).and_then(|n| usize::try_from(n).ok()) {
            Some(n) if (1..=MAX_THREADS).contains(&n) => Ok(n),
            _ => Err(Error::invalid("threads", format!("\"{t}\" is not a whole number from 1 to {MAX_THREADS}"))),
        })
        .transpose()?;
    let memory = match text("memory") {
        None => Cost::MOST_BYTES,
        Some(text) => match text.parse::<f64>() {
            Ok(gib) if gib > 0.0 && gib <= MAX_MEMORY => gib * (1u64 << 30) as f64,
            _ => {
                return Err(Error::invalid(
                    "memory",
                    format!("\"{text}\" is not a number of GiB above 0 and up to {MAX_MEMORY:e}"),
                ));
            }
        },
    };
    Ok(Request {
        command,
        fields,
        out: text("out").map(PathBuf::from),
        force: flag("force"),
        json: flag("json"),
        print_spec: flag("print_spec"),
        quiet: flag("quiet"),
        threads,
        memory,
        figure: text("figure"),
        from: text("from").map(PathBuf::from),
        resume: text("resume").map(PathBuf::from),
        x: text("x"),
        y: text("y"),
        quantity: text("quantity"),
        xsa: XSA.iter().filter_map(|(name, _, _)| Some((*name, text(name)?))).collect(),
    })
}
