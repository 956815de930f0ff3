//! Replicas that are asked to stop, within a step and within a record; and records that share a step.

use std::sync::atomic::{AtomicU64, Ordering};

use headflow_model::{Activation, Error, OrderParameters, StopReason, Task, Theta, Unwatched, Watch};
use headflow_sims::direct;
use headflow_sims::ensemble::{Options, resume, simulate};
use headflow_sims::overlap_chain::Chain;
use headflow_sims::population_loss::{population_loss, population_loss_watched};
use headflow_sims::sgd::{Engine, Halt, Sgd, Start};
use nalgebra::DMatrix;

/// Interrupts from the `after`-th time on that it is asked, counted from 1.
struct After {
    asked: AtomicU64,
    after: u64,
}

impl After {
    fn new(after: u64) -> Self {
        Self { asked: AtomicU64::new(0), after }
    }
}

impl Watch for After {
    fn advance(&self, _: u64) {}

    fn interrupted(&self) -> bool {
        self.asked.fetch_add(1, Ordering::SeqCst) + 1 >= self.after
    }
}

fn sgd(engine: Engine, length: usize, dimension: usize, batch: usize) -> Sgd {
    let task = Task::new(length, Theta::Flip { nu: vec![2.0] }).unwrap();
    Sgd { task, attention: Activation::Softmax.into(), dimension, gamma: 1.0, batch, seed: 7, engine }
}

fn random(heads: usize) -> Start {
    Start::Random { heads, scale: 0.5, b: vec![0.0; heads] }
}

/// A long step of the chain that is broken off anywhere leaves it as it was: it goes on with the same bits.
#[test]
fn a_chain_is_left_as_it_was() {
    for (heads, batch) in [(160, 1), (16, 80_000)] {
        let mut chain = Chain::new(&sgd(Engine::Overlap, 4, 2000, batch), &random(heads), 0).unwrap();
        chain.advance().unwrap();
        let before = chain.state();
        let mut next = chain.clone();
        let whole = After::new(u64::MAX);
        next.advance_watched(&whole).unwrap();
        let asked = whole.asked.into_inner();
        assert!(asked > 100, "{heads} heads ask {asked} times");
        for after in (1..=asked).step_by(asked as usize / 12) {
            assert_eq!(chain.advance_watched(&After::new(after)), Err(Halt::Interrupted));
            assert_eq!(chain.state(), before, "{after} of {asked}");
        }
        chain.advance().unwrap();
        assert_eq!(chain.state(), next.state());
    }
}

/// A long step of direct SGD takes the same bits in pieces, and is broken off between them.
#[test]
fn direct_steps_are_taken_in_pieces() {
    for batch in [1, 3] {
        // 40 tokens of 300000 numbers: more than a step may take without a look.
        let sgd = sgd(Engine::Direct, 40, 300_000, batch);
        let mut plain = direct::Replica::new(&sgd, &random(2), 0).unwrap();
        let mut watched = plain.clone();
        plain.advance().unwrap();
        let whole = After::new(u64::MAX);
        watched.advance_watched(&whole).unwrap();
        assert_eq!(plain.overlaps(), watched.overlaps());
        let asked = whole.asked.into_inner();
        assert!(asked > 100, "{asked}");
        for after in [1, asked / 2, asked] {
            assert_eq!(watched.clone().advance_watched(&After::new(after)), Err(Halt::Interrupted));
        }
        assert!(plain.overlaps_watched(&After::new(2)).is_none());
    }
}

#[test]
fn a_loss_is_whole_or_interrupted() {
    let task = Task::new(4, Theta::Flip { nu: vec![2.0] }).unwrap();
    let attention = Activation::Softmax.into();
    let m = DMatrix::from_row_slice(2, 1, &[1.0, -0.5]);
    let r = &m * m.transpose() + DMatrix::identity(2, 2) * 0.1;
    let at = (&m, &r, &[0.0, 0.0][..]);
    // More samples than are drawn between two looks.
    let samples = 400_000;
    let whole = population_loss(&task, &attention, 100, at, samples, 1, 0).unwrap();
    let never = After::new(u64::MAX);
    assert_eq!(population_loss_watched(&task, &attention, 100, at, samples, 1, 0, &never).unwrap(), whole);
    let asked = never.asked.into_inner();
    assert!(asked >= 2, "{asked}");
    for after in 1..=asked {
        let error = population_loss_watched(&task, &attention, 100, at, samples, 1, 0, &After::new(after)).unwrap_err();
        assert!(matches!(error, Error::Interrupted { .. }), "{error}");
    }
}

/// Wherever an ensemble of chains is interrupted, it goes on from there with the bits of an unbroken one.
#[test]
fn an_ensemble_goes_on_from_anywhere() {
    let sgd = sgd(Engine::Overlap, 4, 500, 1);
    let start = Start::Given(
        OrderParameters::new(DMatrix::from_row_slice(2, 1, &[0.3, -0.2]), DMatrix::identity(2, 2), vec![0.0; 2])
            .unwrap(),
    );
    let options = Options { times: vec![0.0, 0.5, 1.0], replicas: 2, test_samples: 50 };
    let whole = simulate(&sgd, &start, &options, &Unwatched).unwrap();
    let never = After::new(u64::MAX);
    simulate(&sgd, &start, &options, &never).unwrap();
    let asked = never.asked.into_inner();
    let mut broken = 0;
    for after in 1..=asked {
        match simulate(&sgd, &start, &options, &After::new(after)) {
            Ok(part) => {
                let Some(checkpoint) = &part.unfinished else { continue };
                assert!(matches!(part.stop, StopReason::Interrupted { .. }));
                let rest = resume(&sgd, &start, &options, Some(checkpoint), &mut |_| Ok(()), &Unwatched).unwrap();
                assert_eq!(rest.estimate, whole.estimate, "{after} of {asked}");
                broken += 1;
            }
            Err(error) => assert!(matches!(error, Error::Interrupted { .. }), "{error}"),
        }
    }
    assert!(broken >= 2, "{broken} of {asked}");
}

/// Records that fall on the same step share its state, and its loss is measured once.
#[test]
fn records_beyond_the_steps_are_measured_once() {
    for engine in [Engine::Direct, Engine::Overlap] {
        let sgd = sgd(engine, 4, 100, 1);
        let start = random(2);
        let last = 5.0 * sgd.time_step();
        let run = |records: u32| {
            let times = (0..=records).map(|k| last * f64::from(k) / f64::from(records)).collect();
            let options = Options { times, replicas: 1, test_samples: 400_000 };
            let watch = After::new(u64::MAX);
            (simulate(&sgd, &start, &options, &watch).unwrap().runs.remove(0).trajectory, watch.asked.into_inner())
        };
        let ((few, asked_few), (many, asked_many)) = (run(5), run(50));
        assert_eq!((few.times.len(), many.times.len()), (6, 51));
        for (t, row) in many.times.iter().zip(&many.rows) {
            // Each at the nearest step.
            assert_eq!(row, &few.rows[sgd.step_at(*t) as usize], "{engine:?} {t}");
        }
        // A loss asks every 170000 samples.
        assert!(asked_few > 6 * 2 && asked_many == asked_few, "{engine:?}: {asked_few} looks, and {asked_many}");
    }
}
