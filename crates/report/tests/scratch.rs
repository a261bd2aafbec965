#![allow(missing_docs, clippy::unwrap_used)]
use serde_json::Value;
#[test]
fn scratch() {
    let w = std::path::Path::new("/tmp/rp/w");
    let read =
        |n: &str| -> Value { serde_json::from_slice(&std::fs::read(w.join(n)).unwrap()).unwrap() };
    let s = read("sweep_after.json");
    let sentences: Vec<String> = serde_json::from_value(read("sentences.json")).unwrap();
    std::fs::write(
        w.join("sweep_after.html"),
        powerinfer_report::sweep_page(&s, &sentences).unwrap(),
    )
    .unwrap();
    let p = read("demo.powerinfer/profile/profile.json");
    let curve = |all: &Value| {
        let c: Vec<f64> = serde_json::from_value(all.clone()).unwrap();
        let mut v = vec![0.0];
        for i in 1..=100 {
            let t = i as f64 / 10.0;
            let k = (t.ceil() as usize).max(1);
            let a = if k == 1 { 0.0 } else { c[k - 2] };
            let b = c[k - 1];
            v.push(a + (b - a) * (t - (k - 1) as f64));
        }
        v
    };
    let mut curves: Vec<Vec<f64>> = p["layers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|l| curve(&l["cumulative"]))
        .collect();
    curves.push(curves[0].clone());
    std::fs::write(
        w.join("profile_after.html"),
        powerinfer_report::profile_page(&p, &curves).unwrap(),
    )
    .unwrap();
    let d = read("plan.json");
    let plan = serde_json::from_value(d["plan"].clone()).unwrap();
    let model = serde_json::from_value(d["model"].clone()).unwrap();
    std::fs::write(
        w.join("place_after.html"),
        powerinfer_report::plan_page(&model, &plan, &["predicted: x".to_owned()]).unwrap(),
    )
    .unwrap();
}
