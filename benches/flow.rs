//! The flow of the default experiment at 2^14 points, points drawn and not, and one evaluation.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use headflow::model::Unwatched;
use headflow::spec::{Purpose, Spec};
use headflow::theory::flow::average;
use headflow::theory::moments::{Coordinates, Evaluator};

const POINTS: usize = 1 << 14;

fn flow(criterion: &mut Criterion) {
    let defaults = Spec { points: Some(POINTS), scrambles: Some(1), ..Spec::default() };
    let spec = defaults.complete(Purpose::Flow).expect("the default spec is valid");
    let draw = || spec.evaluators().expect("valid points");
    let start = spec.start().expect("a valid start");
    let options = spec.flow_options();

    let mut group = criterion.benchmark_group("flow, 2^14 points");
    group.sample_size(20);
    group.bench_function("draw the points", |bencher| bencher.iter(|| black_box(draw())));
    group.bench_function("tau = 400, 101 records, points drawn", |bencher| {
        bencher.iter(|| average(&draw(), &start, &options, &Unwatched).expect("a valid flow"));
    });
    let points = draw();
    let at = Coordinates::of(&start, &spec.attention());
    group.throughput(Throughput::Elements(POINTS as u64));
    group.bench_function("moments", |bencher| bencher.iter(|| points[0].moments(black_box(&at))));
    group.bench_function("loss", |bencher| bencher.iter(|| points[0].loss(black_box(&at))));
    group.finish();
}

criterion_group!(benches, flow);
criterion_main!(benches);
