//! Memory account of a placement: every use of memory on every device, line by line.

use powerinfer_artifact::plan::{
    ATTENTION, BudgetLine, COLD_NEURONS, Device, EMBEDDINGS, HEAD, HOT_NEURONS, KV_CACHE,
    PINNED_EMBEDDINGS, PREDICTORS, PREFILL_BATCH, RESERVE, SCRATCH,
};

use crate::{Problem, SolveError, placement::Placement};

/// All lines of the memory account. The context and scratch of a GPU are listed only if the placement
/// uses it.
pub(crate) fn lines(problem: &Problem, placement: &Placement) -> Vec<BudgetLine> {
    account(problem, placement).0
}

/// All lines of the memory account, and the prefill batch that they have room for, in tokens.
pub(crate) fn account(problem: &Problem, placement: &Placement) -> (Vec<BudgetLine>, usize) {
    let mut lines = Vec::new();
    for gpu in 0..problem.budget.vram_per_gpu().len() {
        gpu_lines(problem, placement, gpu, &mut lines);
    }
    let mut line = |name: &str, bytes: u64| push(&mut lines, name, Device::Cpu, 0, bytes);
    let [attention, predictors, kv] = dense(problem, placement, Device::Cpu, None);
    let layers = problem.layers.iter().zip(&placement.layers);
    let cold =
        layers.map(|(layer, place)| layer.neurons_bytes(layer.frequencies.len() - place.hot_count));
    line(ATTENTION, attention);
    line(PREDICTORS, predictors);
    if placement.head == Device::Cpu && !problem.tied_head {
        line(HEAD, problem.head_bytes);
    }
    line(KV_CACHE, kv);
    line(EMBEDDINGS, problem.embedding_bytes);
    line(SCRATCH, problem.cpu_scratch_bytes);
    line(COLD_NEURONS, cold.sum());
    let left = (problem.budget.ram_bytes).saturating_sub(bytes_on(Device::Cpu, &lines));
    if looks_up_embeddings(problem, placement) && problem.pinned_embedding_bytes <= left {
        let bytes = problem.pinned_embedding_bytes;
        push(&mut lines, PINNED_EMBEDDINGS, Device::Cpu, 0, bytes);
    }
    let gpus = 0..problem.budget.vram_per_gpu().len();
    let mut prompt_batch = if gpus.into_iter().any(|gpu| placement.use_gpu(gpu)) {
        problem.prompt_batch
    } else {
        PREFILL_BATCH
    };
    if problem.budget.vram_per_gpu().len() == 1 && placement.is_on_gpu(problem) {
        let left = problem
            .budget
            .vram_bytes
            .saturating_sub(bytes_on(Device::Gpu, &lines));
        let more = problem.gpu_prompt_bytes.iter();
        let more = more.copied().find(|(_, bytes)| *bytes <= left);
        let mut scratch = lines
            .iter_mut()
            .filter(|line| line.name == SCRATCH && line.device == Device::Gpu);
        if let (Some(line), Some((tokens, bytes))) = (scratch.next(), more) {
            line.bytes += bytes;
            prompt_batch = tokens;
        }
    }
    (lines, prompt_batch)
}

/// Whether a single GPU has the head and the attention of the first layer, so that it can look up the embedding of the next token.
fn looks_up_embeddings(problem: &Problem, placement: &Placement) -> bool {
    problem.budget.vram_per_gpu().len() == 1
        && placement.head == Device::Gpu
        && placement.layers[0].attention == Device::Gpu
}

fn gpu_lines(problem: &Problem, placement: &Placement, gpu: usize, lines: &mut Vec<BudgetLine>) {
    let mut line = |name: &str, bytes: u64| push(lines, name, Device::Gpu, gpu, bytes);
    let [attention, predictors, kv] = dense(problem, placement, Device::Gpu, Some(gpu));
    let layers = problem.layers.iter().zip(&placement.layers);
    let hot = layers
        .filter(|(_, place)| place.gpu == gpu)
        .map(|(layer, place)| layer.neurons_bytes(place.hot_count));
    if placement.use_gpu(gpu) {
        line(RESERVE, problem.gpu_reserve_bytes());
        let copied = placement.copied_bytes(problem).total();
        line(SCRATCH, problem.gpu_scratch_bytes + copied);
    }
    line(ATTENTION, attention);
    line(PREDICTORS, predictors);
    if placement.head == Device::Gpu && placement.head_gpu == gpu {
        line(HEAD, problem.head_bytes);
    }
    line(KV_CACHE, kv);
    line(HOT_NEURONS, hot.sum());
}

/// Bytes of attention, predictors and KV cache on `device`; of one GPU's layers only, if `gpu` is given.
fn dense(problem: &Problem, placement: &Placement, device: Device, gpu: Option<usize>) -> [u64; 3] {
    let mut sums = [0; 3];
    let layers = problem.layers.iter().zip(&placement.layers);
    for (layer, place) in layers.filter(|(_, place)| gpu.is_none_or(|gpu| place.gpu == gpu)) {
        let parts = [
            (place.attention, layer.attention_bytes),
            (place.predictor, layer.predictor_bytes),
            (place.kv, layer.kv_bytes),
        ];
        for (sum, (part_device, bytes)) in sums.iter_mut().zip(parts) {
            if part_device == device {
                *sum += bytes;
            }
        }
    }
    sums
}

fn push(lines: &mut Vec<BudgetLine>, name: &str, device: Device, gpu: usize, bytes: u64) {
    if bytes > 0 {
        lines.push(BudgetLine {
            name: name.to_owned(),
            device,
            gpu,
            bytes,
        });
    }
}

/// Sum of the lines on `device`, in bytes.
pub(crate) fn bytes_on(device: Device, lines: &[BudgetLine]) -> u64 {
    let here = lines.iter().filter(|line| line.device == device);
    here.map(|line| line.bytes).sum()
}

/// The error for a budget of `device` below `needed` bytes. It names the first line that does not fit;
/// `least` is the placement with the fewest bytes on the device.
pub(crate) fn too_small(
    problem: &Problem,
    least: &Placement,
    device: Device,
    needed: u64,
) -> SolveError {
    let budget = problem.budget.bytes(device);
    let mut used: u64 = 0;
    let lines = lines(problem, least);
    let mut here = lines.iter().filter(|line| line.device == device);
    let line = here.find(|line| {
        used = used.saturating_add(line.bytes);
        used > budget
    });
    // `needed` can exceed the sum of the lines, since layers take room in whole groups.
    let last = lines.iter().rev().find(|line| line.device == device);
    let (line, line_bytes) = line
        .or(last)
        .map_or((COLD_NEURONS.to_owned(), needed), |line| {
            (line.name.clone(), line.bytes)
        });
    SolveError::TooSmall {
        device,
        budget,
        line,
        line_bytes,
        needed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CopiedBytes, placement::LayerPlacement, samples};

    #[test]
    fn prompts_get_the_largest_scratch_that_fits_if_the_gpu_has_all_layers() {
        let mut problem = samples::small();
        let hot_count = problem.layers[0].frequencies.len();
        let on_gpu = LayerPlacement {
            gpu: 0,
            attention: Device::Gpu,
            kv: Device::Gpu,
            predictor: Device::Gpu,
            hot_count,
        };
        let all = Placement {
            layers: vec![on_gpu; problem.layers.len()],
            head: Device::Cpu,
            head_gpu: 0,
        };
        let scratch = |problem: &Problem, placement: &Placement| {
            let (lines, batch) = account(problem, placement);
            let mut lines = lines.iter();
            let is_it = |line: &&BudgetLine| line.name == SCRATCH && line.device == Device::Gpu;
            lines.find(is_it).map(|line| (line.bytes, batch))
        };
        let without = bytes_on(Device::Gpu, &lines(&problem, &all));
        problem.gpu_prompt_bytes = vec![(512, 400), (256, 200), (128, 100)];
        for (left, more, batch) in [
            (1000, 400, 512),
            (400, 400, 512),
            (399, 200, 256),
            (100, 100, 128),
            (99, 0, 64),
        ] {
            problem.budget.vram_bytes = without + left;
            let want = Some((5_000 + more, batch));
            assert_eq!(scratch(&problem, &all), want, "{left}");
        }
        problem.budget.vram_bytes = u64::MAX;
        let mut parts = [on_gpu; 3];
        parts[0].attention = Device::Cpu;
        parts[1].hot_count -= 1;
        parts[2].kv = Device::Cpu;
        for part in parts {
            let mut placement = all.clone();
            placement.layers[0] = part;
            assert_eq!(scratch(&problem, &placement), Some((5_000, 64)));
        }
        problem.budget.vram_split = vec![without, 1000];
        assert_eq!(scratch(&problem, &all), Some((5_000, 64)));
    }

    /// Placement of all layers and the head on the GPU.
    fn all_on_gpu(problem: &Problem) -> Placement {
        let layer = LayerPlacement {
            gpu: 0,
            attention: Device::Gpu,
            kv: Device::Gpu,
            predictor: Device::Gpu,
            hot_count: problem.layers[0].frequencies.len(),
        };
        Placement {
            layers: vec![layer; problem.layers.len()],
            head: Device::Gpu,
            head_gpu: 0,
        }
    }

    #[test]
    fn only_copies_of_parts_that_a_layer_lacks_take_memory() {
        let mut problem = samples::small();
        problem.copied_bytes = CopiedBytes {
            attention: 100,
            predictor: 10,
            kv: 1,
            routing: 2_000,
        };
        problem.layers[1].predictor_bytes = 7;
        let scratch = |change: fn(&mut LayerPlacement)| {
            let mut placement = all_on_gpu(&problem);
            placement.layers.iter_mut().for_each(change);
            let lines = lines(&problem, &placement);
            let is_it = |line: &&BudgetLine| line.name == SCRATCH && line.device == Device::Gpu;
            lines.iter().find(is_it).map(|line| line.bytes)
        };
        assert_eq!(scratch(|_| {}), Some(5_000));
        assert_eq!(scratch(|layer| layer.kv = Device::Cpu), Some(5_001));
        assert_eq!(scratch(|layer| layer.predictor = Device::Cpu), Some(5_010));
        assert_eq!(scratch(|layer| layer.attention = Device::Cpu), Some(7_100));
        problem.copied_bytes.attention = 1 << 40;
        let (plan, _) = crate::place(&problem, &Default::default()).unwrap();
        assert_eq!(plan.totals.gpu_bytes, 0, "there is no room for the copies");
    }

    #[test]
    fn embeddings_are_pinned_if_the_gpu_looks_them_up_and_there_is_room() {
        let mut problem = samples::small();
        problem.pinned_embedding_bytes = 500;
        let pinned = |problem: &Problem, change: fn(&mut Placement)| {
            let mut placement = all_on_gpu(problem);
            change(&mut placement);
            let lines = lines(problem, &placement);
            let mut pinned = lines.iter().filter(|line| line.name == PINNED_EMBEDDINGS);
            let pinned = pinned.next().map(|line| line.bytes);
            (pinned, bytes_on(Device::Cpu, &lines))
        };
        let (bytes, on_cpu) = pinned(&problem, |_| {});
        assert_eq!(bytes, Some(500));
        for change in [
            (|placement| placement.head = Device::Cpu) as fn(&mut Placement),
            |placement| placement.layers[0].attention = Device::Cpu,
        ] {
            assert_eq!(pinned(&problem, change).0, None);
        }
        problem.budget.ram_bytes = on_cpu;
        assert_eq!(pinned(&problem, |_| {}).0, Some(500));
        problem.budget.ram_bytes -= 1;
        assert_eq!(pinned(&problem, |_| {}).0, None);
    }
}
