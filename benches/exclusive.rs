//! Exclusive against plain attention: ratios of time, forward and with its gradient, and of memory, against the
//! length. The two alternate, in either order, and a ratio is the median over such pairs.

use std::time::Instant;

use headflow::model::random::{Purpose, Stream};
use headflow::xsa::{Inputs, SelfAttention, Shape, Sinks};

fn normals(number: u64, count: usize) -> Vec<f32> {
    let mut out = vec![0.0; count];
    Stream::new(1, Purpose::Values, 0).normals(number, 0, 0, &mut out);
    out
}

fn timed(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

fn main() {
    println!("8 heads on 2 key-value heads of 64, causal, f32; seconds, and exclusive / plain");
    println!("{:>8} {:>10} {:>8} {:>12} {:>8} {:>8}", "tokens", "forward", "ratio", "and gradient", "ratio", "memory");
    // Cargo passes --bench; a test run asks for the shortest alone.
    let lengths: &[usize] =
        if std::env::args().any(|a| a == "--bench") { &[512, 1024, 2048, 4096, 8192, 16_384] } else { &[64] };
    for &tokens in lengths {
        let shape = Shape { tokens, heads: 8, key_value_heads: 2, key_size: 64, value_size: 64 };
        let (queries, keys, values) = (normals(0, tokens * 512), normals(1, tokens * 128), normals(2, tokens * 128));
        let inputs = Inputs { queries: &queries, keys: &keys, values: &values, sinks: Sinks::default() };
        let slopes = normals(3, tokens * 512);
        let both = [false, true].map(|exclusive| SelfAttention { exclusive, ..SelfAttention::default() });
        let mut numbers = [0usize; 2];
        // Seconds of plain attention and the ratio, for each pair: forward, and with the gradient.
        let mut pairs: [Vec<(f64, f64)>; 2] = Default::default();
        for repeat in 0..(1 << 21) / (tokens * tokens / 64).max(1 << 13) + 6 {
            let mut times = [[0.0; 2]; 2];
            for k in [repeat % 2, 1 - repeat % 2] {
                let mut attended = None;
                times[0][k] = timed(|| attended = both[k].forward(&shape, &inputs).ok());
                let attended = attended.expect("valid inputs");
                let removed = attended.removed.as_ref().map_or(0, Vec::len);
                // Inputs and outputs: what is of the order of the length.
                numbers[k] = attended.outputs.len() + attended.log_normalizers.len() + removed + tokens * 768;
                times[1][k] = times[0][k]
                    + timed(|| {
                        both[k].backward(&shape, &inputs, &attended, &slopes).expect("valid inputs");
                    });
            }
            for (pairs, time) in pairs.iter_mut().zip(times) {
                pairs.push((time[0], time[1] / time[0]));
            }
        }
        let median = |values: &mut dyn Iterator<Item = f64>| {
            let mut values: Vec<f64> = values.collect();
            values.sort_by(f64::total_cmp);
            values[values.len() / 2]
        };
        let column =
            pairs.map(|pairs| [median(&mut pairs.iter().map(|p| p.0)), median(&mut pairs.iter().map(|p| p.1))]);
        println!(
            "{tokens:>8} {:>10.4} {:>8.3} {:>12.4} {:>8.3} {:>8.3}",
            column[0][0],
            column[0][1],
            column[1][0],
            column[1][1],
            numbers[1] as f64 / numbers[0] as f64
        );
    }
}
