//! Exclusive against plain attention: ratios of time, forward and with its gradient, and of memory, against the
//! length. The two alternate, and the fastest of each counts, so that both meet the same machine.

use std::time::{Duration, Instant};

use headflow::model::random::{Purpose, Stream};
use headflow::xsa::{Inputs, SelfAttention, Shape, Sinks};

fn normals(number: u64, count: usize) -> Vec<f32> {
    let mut out = vec![0.0; count];
    Stream::new(1, Purpose::Values, 0).normals(number, 0, 0, &mut out);
    out
}

fn timed(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

fn main() {
    println!("8 heads on 2 key-value heads of 64, causal, f32; seconds, and exclusive / plain");
    println!("{:>8} {:>10} {:>8} {:>12} {:>8} {:>8}", "tokens", "forward", "ratio", "and gradient", "ratio", "memory");
    // Cargo passes --bench; a test run asks for the shortest alone.
    let lengths: &[usize] =
        if std::env::args().any(|a| a == "--bench") { &[512, 1024, 2048, 4096, 8192, 16_384] } else { &[64] };
    for &tokens in lengths {
        let shape = Shape { tokens, heads: 8, key_value_heads: 2, key_size: 64, value_size: 64 };
        let (queries, keys, values) =
            (normals(0, tokens * 512), normals(1, tokens * 128), normals(2, tokens * 128));
        let inputs = Inputs { queries: &queries, keys: &keys, values: &values, sinks: Sinks::default() };
        let slopes = normals(3, tokens * 512);
        let both = [false, true].map(|exclusive| SelfAttention { exclusive, ..SelfAttention::default() });
        let mut best = [[Duration::MAX; 2]; 2];
        let mut numbers = [0usize; 2];
        let repeats = (1 << 15) / tokens.max(512) + 4;
        for _ in 0..repeats {
            for (k, attention) in both.iter().enumerate() {
                let mut attended = None;
                best[0][k] = best[0][k].min(timed(|| attended = attention.forward(&shape, &inputs).ok()));
                let attended = attended.expect("valid inputs");
                let removed = attended.removed.as_ref().map_or(0, Vec::len);
                // Inputs and outputs: what is of the order of the length.
                numbers[k] = attended.outputs.len() + attended.log_normalizers.len() + removed + tokens * 768;
                best[1][k] = best[1][k].min(timed(|| {
                    attention.backward(&shape, &inputs, &attended, &slopes).expect("valid inputs");
                }));
            }
        }
        let ratio = |t: [Duration; 2]| t[1].as_secs_f64() / t[0].as_secs_f64();
        println!(
            "{tokens:>8} {:>10.4} {:>8.3} {:>12.4} {:>8.3} {:>8.3}",
            best[0][0].as_secs_f64(),
            ratio(best[0]),
            (best[0][0] + best[1][0]).as_secs_f64(),
            ratio([best[0][0] + best[1][0], best[0][1] + best[1][1]]),
            numbers[1] as f64 / numbers[0] as f64
        );
    }
}
