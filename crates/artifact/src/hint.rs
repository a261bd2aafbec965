//! Advice on an error that names a command or an option: libraries choose the remedy, and the command
//! line puts it into words.

/// Remedy for an error.
///
/// An error enum has `fn hint(&self) -> Option<Hint>`, which also asks the errors it wraps. The command
/// line prints the sentence of the first hint in the chain of causes. Advice that names neither a
/// command nor an option is part of the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Hint {
    /// Write to another folder, or remove the one in the way.
    OtherFolder,
    /// Move other files out of the folder, or write to another folder.
    MoveForeign,
    /// Write jobs to another folder, or remove what is in the way.
    OtherJobsFolder,
    /// Wait until the other run is done, or write to another folder.
    WaitOrOtherFolder,
    /// Write to another file.
    OtherFile,
    /// Wait until the other run is done, or write to another file.
    WaitOrOtherFile,
    /// Neither lock the model in memory nor load it, or raise the system's limit.
    NoMemoryLock,
    /// Measure the machine, or correct the hardware file.
    MeasureHardware,
    /// Measure the machine again when nothing else runs.
    MeasureWhenIdle,
    /// Write a hardware file of this machine.
    WriteHardwareFile,
    /// Make a bundle.
    MakeBundle,
    /// Make the bundle again from its model.
    MakeBundleAgain,
    /// Re-plan: another version of the program made the plan, or it was edited.
    PlaceAgain,
    /// Place with a larger memory budget.
    LargerBudget,
    /// Skip fewer neurons, or certify with a larger perplexity budget.
    LessSkipping,
    /// Allow the named amount of memory on the CPU.
    AllowRam,
    /// Allow the named amount of memory on the GPU.
    AllowVram,
    /// Place without input sparsity.
    NoInputSparsity,
    /// Place with more tokens of context.
    LongerContext,
    /// Give another context, or decode fewer tokens.
    OtherContext,
    /// Place with fewer tokens of context.
    ShorterContext,
    /// Place with more VRAM or fewer tokens of context.
    MoreVramOrShorterContext,
    /// Place with less VRAM, or use less of it.
    LessVram,
    /// Re-plan the bundle with a VRAM budget, or ask for no GPU.
    PlaceOnGpu,
    /// Re-plan the bundle with less VRAM.
    SmallerVram,
    /// Run on the CPU.
    RunOnCpu,
    /// Resume on the CPU after the last finished layer.
    ResumeOnCpu,
    /// Choose no policy.
    OtherPolicy,
    /// Allow perplexity to rise further.
    LargerPerplexityBudget,
    /// Name a machine to plan for.
    NameHardware,
    /// Name the amount of VRAM, or a machine.
    GiveVramOrHardware,
    /// Use the profile that the predictors were made from, or train them with this one.
    ProfileOfPredictors,
    /// Leave out input sparsity, or write a bundle.
    NoDryRun,
    /// Hold out more text, and use more of it.
    MoreHeldOutText,
    /// Certify on some held-out text.
    Certify,
    /// Profile more text, because all held-out text is already used.
    ProfileMoreText,
    /// Put fewer neurons on the GPU, or allow more VRAM.
    FewerHotNeurons,
    /// Use a policy for activations that are exactly zero.
    ZerosPolicy,
    /// Train predictors, then run `place`.
    TrainPredictorsAndPlace,
    /// Train predictors.
    TrainPredictors,
    /// Train predictors with other options: more bytes, or a lower recall.
    TrainOtherPredictors,
    /// Allow predictors more bytes.
    LargerPredictors,
    /// Place with weights in a smaller format.
    SmallerFormat,
    /// Place with weights in a format of a wider range.
    WiderFormat,
    /// Use thresholds, or compute all neurons, because the activation is never exactly zero.
    ThresholdPolicy,
    /// Use a lossless policy, or train predictors and run `place`.
    LosslessPolicyOrTrain,
    /// Use a lossless policy, or pack the signs of the gate.
    LosslessPolicyOrSigns,
    /// Use the dense policy, or train predictors and run `place`.
    DensePolicyOrTrain,
    /// Delete the prompt cache, or name another file.
    OtherPromptCache,
    /// Download one file of the model and open it.
    PullOneFile,
    /// Make a profile.
    Profile,
    /// Remove the profile and make it again.
    ProfileAgain,
    /// Give calibration text.
    GiveText,
    /// Give a path that exists.
    GivePath,
    /// Ask for verbose output, which lists all.
    ListAll,
    /// Give more calibration text, or use more of it.
    MoreText,
    /// Profile more tokens.
    MoreTokens,
    /// Train with another seed.
    OtherSeed,
    /// Import predictors as 32-bit floats.
    ImportAsF32,
    /// Install what judges generated Python functions.
    InstallPython,
    /// Allow VRAM, or pin nothing to the GPU.
    AllowVramOrUnpin,
    /// Optimise latency.
    LatencyObjective,
    /// Leave the rank of the synthetic predictors out.
    NoPredictorRank,
    /// Export the weights without the tokenizer.
    NoTokenizer,
    /// Export to the original engine, or for measurements of speed.
    OtherActivation,
    /// Use another format of weights.
    OtherFormat,
    /// Export a GGUF file for llama.cpp.
    ExportGguf,
    /// Place with policies that need no predictors.
    PlaceWithoutPredictors,
    /// Place with predictors in every layer.
    PlaceWithPredictors,
    /// Place for one GPU.
    PlaceOnOneGpu,
    /// Merge the shards.
    MergeShards,
    /// Measure the bandwidth with less memory.
    SmallerProbe,
    /// Serve on another port.
    OtherPort,
    /// Serve fewer requests at a time, or shorter ones.
    FewerRequests,
    /// Check the connection and the address of the hub.
    CheckConnection,
    /// Try again later.
    TryLater,
}
