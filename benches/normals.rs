//! Standard normals alone: the floor under every step of direct SGD.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use headflow::model::random::{Purpose, Stream};

/// Tokens of a sample.
const LENGTH: usize = 6;

fn normals(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("normals");
    for dimension in [1000usize, 10_000] {
        let stream = Stream::new(1, Purpose::Tokens, 0);
        let stride = headflow::sims::kernels::stride(dimension);
        let mut tokens = aligned_vec::avec![0.0f32; LENGTH * stride];
        let mut step = 0;
        group.throughput(Throughput::Elements((LENGTH * dimension) as u64));
        group.bench_function(format!("L=6 D={dimension}"), |bencher| {
            bencher.iter(|| {
                step += 1;
                for (l, token) in tokens.chunks_exact_mut(stride).enumerate() {
                    stream.normals(step, l as u32, 0, &mut token[..dimension]);
                }
                black_box(&mut tokens);
            });
        });
    }
    group.finish();
}

criterion_group!(benches, normals);
criterion_main!(benches);
