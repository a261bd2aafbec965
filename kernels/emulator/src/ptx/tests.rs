//! The interpreter on the shipped PTX and on small modules.
#![expect(unsafe_code, reason = "launches kernels")]

use half::f16;
use powerinfer_kernels::cuda::{Device, DeviceError, Launch, ptx_modules};

use super::{PtxDevice, decode::decode, parse::Module};

/// Words of the buffer of test kernels, and their shared memory.
const WORDS: usize = 64;
const SHARED_BYTES: usize = 256;

#[test]
fn all_shipped_kernels_are_known() {
    let mut kernels = 0;
    for (name, ptx) in ptx_modules() {
        let module = Module::parse(name, &ptx).unwrap();
        for function in module.functions.iter().filter(|found| found.is_kernel) {
            if let Err(error) = decode(&module, function) {
                panic!("{error}");
            }
            kernels += 1;
        }
    }
    let entries = ptx_modules().map(|(_, ptx)| ptx.matches(".visible .entry").count());
    assert_eq!(kernels, entries.sum::<usize>());
}

/// A module with the kernel `test` of these statements, which start at line 17. `%rd0` is the address of the buffer,
/// `%r0` the thread.
fn module(statements: &str) -> String {
    format!(
        ".version 8.4\n.target sm_80\n.address_size 64\n.extern .shared .align 16 .b8 memory[];\n\
         .visible .entry test(\n.param .u64 buffer\n)\n.maxntid 64,1,1\n{{\n.reg .pred %p<10>;\n.reg .b16 %rs<10>;\n\
         .reg .b32 %r<20>;\n.reg .f32 %f<20>;\n.reg .b64 %rd<10>;\nld.param.u64 %rd0,[buffer];\nmov.u32 %r0,%tid.x;\n\
         {statements}\nret;\n}}\n"
    )
}

/// Runs a kernel of these statements on a buffer; returns the buffer, or the error.
fn run(statements: &str, threads: u32, buffer: [u32; WORDS]) -> Result<[u32; WORDS], String> {
    let device = PtxDevice::with_module(1, "test.ptx", &module(statements))
        .map_err(|error| error.to_string())?;
    let mut bytes = buffer.map(u32::to_le_bytes).concat();
    let address = device.allocate(bytes.len()).unwrap();
    // SAFETY: the buffer has these bytes; accesses beyond them are what the interpreter has to catch.
    let outcome = unsafe {
        device.write(address, &bytes).unwrap();
        let outcome = device.launch(&Launch {
            kernel: "test",
            grid: [1; 3],
            threads,
            shared_bytes: SHARED_BYTES,
            arguments: &address.to_le_bytes(),
        });
        device.read(address, &mut bytes).unwrap();
        device.free(address, bytes.len());
        outcome
    };
    match outcome {
        Ok(()) => Ok(std::array::from_fn(|word| {
            u32::from_le_bytes(bytes[4 * word..][..4].try_into().unwrap())
        })),
        Err(DeviceError::Kernel { reason, .. }) => Err(reason),
        Err(other) => Err(other.to_string()),
    }
}

/// The value of `%r1` after statements that find operands in `%r2` and on, and in `%f2` and on.
fn calculate(statements: &str, operands: &[u32]) -> u32 {
    let mut buffer = [0; WORDS];
    buffer[2..2 + operands.len()].copy_from_slice(operands);
    let load = |index: usize| {
        format!(
            "ld.global.u32 %r{index},[%rd0+{}]; mov.b32 %f{index},%r{index};\n",
            4 * index
        )
    };
    let loads: String = (2..2 + operands.len()).map(load).collect();
    let statements = format!("{loads}{statements}\nst.global.u32 [%rd0+4],%r1;");
    run(&statements, 1, buffer).unwrap()[1]
}

/// [`calculate`] for floats: the bits of `%f1`.
fn calculate_floats(statements: &str, operands: &[f32]) -> u32 {
    let operands: Vec<u32> = operands.iter().map(|operand| operand.to_bits()).collect();
    calculate(&format!("{statements} mov.b32 %r1,%f1;"), &operands)
}

#[test]
fn integers_have_their_width_and_sign() {
    let minus = |value: i32| -value as u32;
    for (statements, operands, expected) in [
        ("add.s32 %r1,%r2,%r3;", [u32::MAX, 2, 0], 1),
        ("mul.hi.u32 %r1,%r2,%r3;", [u32::MAX, 3, 0], 2),
        ("mul.hi.s32 %r1,%r2,%r3;", [minus(1), 3, 0], u32::MAX),
        ("mad.lo.s32 %r1,%r2,%r3,%r4;", [minus(3), 5, 1], minus(14)),
        ("div.s32 %r1,%r2,%r3;", [minus(7), 2, 0], minus(3)),
        ("rem.s32 %r1,%r2,%r3;", [minus(7), 2, 0], minus(1)),
        ("min.s32 %r1,%r2,%r3;", [minus(1), 1, 0], minus(1)),
        ("min.u32 %r1,%r2,%r3;", [minus(1), 1, 0], 1),
        // Shifts by more than the width do not wrap.
        ("shl.b32 %r1,%r2,%r3;", [7, 32, 0], 0),
        ("shr.u32 %r1,%r2,%r3;", [minus(7), 33, 0], 0),
        ("shr.s32 %r1,%r2,%r3;", [minus(7), 99, 0], u32::MAX),
        ("shr.s32 %r1,%r2,1;", [minus(7), 0, 0], minus(4)),
        (
            "mul.wide.s32 %rd1,%r2,-4; shr.u64 %rd1,%rd1,32; cvt.u32.u64 %r1,%rd1;",
            [1, 0, 0],
            u32::MAX,
        ),
        (
            "cvt.s64.s32 %rd1,%r2; shr.u64 %rd1,%rd1,32; cvt.u32.u64 %r1,%rd1;",
            [minus(1), 0, 0],
            u32::MAX,
        ),
        (
            "cvt.u64.u32 %rd1,%r2; shr.u64 %rd1,%rd1,32; cvt.u32.u64 %r1,%rd1;",
            [minus(1), 0, 0],
            0,
        ),
        ("cvt.s32.s8 %r1,%r2;", [0x1280, 0, 0], minus(128)),
        (
            "cvt.u16.u32 %rs1,%r2; mul.wide.u16 %r1,%rs1,3;",
            [0x1_8000, 0, 0],
            0x1_8000,
        ),
        (
            "bfi.b32 %r1,%r2,%r3,%r4,4;",
            [0x5, u32::MAX, 8],
            0xffff_f5ff,
        ),
        ("bfi.b32 %r1,%r2,%r3,%r4,8;", [0x5a, 0, 28], 0xa000_0000),
        ("bfi.b32 %r1,%r2,%r3,%r4,0;", [0x5a, 3, 28], 3),
        (
            "cvt.u64.u32 %rd1,%r2; cvt.u64.u32 %rd2,%r3; bfi.b64 %rd1,%rd1,%rd2,36,8; shr.u64 %rd1,%rd1,32; cvt.u32.u64 %r1,%rd1;",
            [0x15a, 7, 0],
            0x5a0,
        ),
        ("popc.b32 %r1,%r2;", [0xf0f1, 0, 0], 9),
        ("brev.b32 %r1,%r2;", [1, 0, 0], 1 << 31),
        ("bfind.shiftamt.u32 %r1,%r2;", [1, 0, 0], 31),
        ("bfind.shiftamt.u32 %r1,%r2;", [0, 0, 0], u32::MAX),
        ("clz.b32 %r1,%r2;", [0, 0, 0], 32),
        (
            "dp4a.s32.s32 %r1,%r2,%r3,%r4;",
            [0xff80_017f, 0x0280_0303, 5],
            5 - 2 + 128 * 128 + 3 + 127 * 3,
        ),
        // Selectors 0 to 7 are bytes, with 8 their sign.
        (
            "prmt.b32 %r1,%r2,%r3,%r4;",
            [0x0302_0100, 0x0706_0580, 0x7c40],
            0x07ff_8000,
        ),
        (
            "prmt.b32 %r1,%r2,%r3,%r4;",
            [0x0302_0100, 0x0706_0580, 0x70c4],
            0x0700_ff80,
        ),
        (
            "lop3.b32 %r1,%r2,%r3,%r4,0xea;",
            [0b1100, 0b1010, 1],
            0b1001,
        ),
    ] {
        assert_eq!(
            calculate(statements, &operands),
            expected,
            "{statements} of {operands:x?}"
        );
    }
}

#[test]
fn logic_follows_its_table() {
    // The columns of the table are the operands.
    let operands = [0xf0f0_f0f0, 0xcccc_cccc, 0xaaaa_aaaa];
    for table in 0..=255u32 {
        let statement = format!("lop3.b32 %r1,%r2,%r3,%r4,{table};");
        assert_eq!(calculate(&statement, &operands), table * 0x0101_0101);
    }
}

#[test]
fn floats_round_as_their_modifiers_say() {
    let (one, tiny) = (1.0f32, f32::EPSILON / 4.0);
    for (statement, operands, expected) in [
        ("add.rn.f32 %f1,%f2,%f3;", [one, tiny, 0.0], one),
        (
            "fma.rn.f32 %f1,%f2,%f2,%f3;",
            [one + f32::EPSILON, -one, 0.0],
            2.0 * f32::EPSILON + f32::EPSILON.powi(2),
        ),
        ("fma.rm.f32 %f1,%f2,%f2,%f3;", [one, tiny, 0.0], one),
        (
            "fma.rm.f32 %f1,%f2,%f2,%f3;",
            [one, -tiny, 0.0],
            one.next_down(),
        ),
        (
            "fma.rm.f32 %f1,%f2,%f2,%f3;",
            [one, -1e-30, 0.0],
            one.next_down(),
        ),
        ("fma.rm.f32 %f1,%f2,%f2,%f3;", [one, -one, 0.0], -0.0),
        (
            "fma.rm.f32 %f1,%f2,%f2,%f3;",
            [f32::MAX, 0.0, 0.0],
            f32::MAX,
        ),
        ("div.rn.f32 %f1,%f2,%f3;", [one, 3.0, 0.0], one / 3.0),
        ("sqrt.rn.f32 %f1,%f2;", [2.0, 0.0, 0.0], 2.0f32.sqrt()),
        ("cvt.sat.f32.f32 %f1,%f2;", [2.0, 0.0, 0.0], 1.0),
        ("cvt.sat.f32.f32 %f1,%f2;", [f32::NAN, 0.0, 0.0], 0.0),
        ("ex2.approx.f32 %f1,%f2;", [-3.0, 0.0, 0.0], 0.125),
        (
            "ex2.approx.f32 %f1,%f2;",
            [-140.0, 0.0, 0.0],
            2.0f32.powi(-140),
        ),
        ("ex2.approx.ftz.f32 %f1,%f2;", [-140.0, 0.0, 0.0], 0.0),
        ("min.f32 %f1,%f2,%f3;", [f32::NAN, 2.0, 0.0], 2.0),
        ("max.f32 %f1,%f2,%f3;", [-0.0, 0.0, 0.0], 0.0),
        ("min.f32 %f1,%f2,%f3;", [0.0, -0.0, 0.0], -0.0),
        ("neg.f32 %f1,%f2;", [0.0, 0.0, 0.0], -0.0),
        (
            "cvt.rn.f32.s32 %f1,%r2;",
            [f32::from_bits(16_777_217), 0.0, 0.0],
            16_777_216.0,
        ),
        (
            "cvt.rn.f16.f32 %rs1,%f2; cvt.f32.f16 %f1,%rs1;",
            [2049.0, 0.0, 0.0],
            2048.0,
        ),
        (
            "cvt.rn.f16.f32 %rs1,%f2; cvt.f32.f16 %f1,%rs1;",
            [3e-8, 0.0, 0.0],
            f16::from_bits(1).to_f32(),
        ),
        (
            "cvt.rn.f16.f32 %rs1,%f2; cvt.f32.f16 %f1,%rs1;",
            [65520.0, 0.0, 0.0],
            f32::INFINITY,
        ),
    ] {
        let found = calculate_floats(statement, &operands);
        assert_eq!(found, expected.to_bits(), "{statement} of {operands:?}");
    }
    // Every operation has the same NaN.
    for statement in [
        "add.rn.f32 %f1,%f2,%f3;",
        "max.f32 %f1,%f3,%f3;",
        "mul.rn.f32 %f1,%f3,%f2;",
    ] {
        let operands = [f32::INFINITY, f32::from_bits(0xffc1_2345)];
        assert_eq!(
            calculate_floats(statement, &operands),
            0x7fff_ffff,
            "{statement}"
        );
    }
}

#[test]
fn comparisons_combine_and_order_nan() {
    let select = |setp: &str| {
        format!("{setp} selp.b32 %r5,1,0,%p1; selp.b32 %r6,2,0,%p2; or.b32 %r1,%r5,%r6;")
    };
    let (nan, one, two) = (f32::NAN.to_bits(), 1.0f32.to_bits(), 2.0f32.to_bits());
    // The result, and its inverse in the second bit.
    for (setp, operands, expected) in [
        ("setp.lt.s32 %p1|%p2,%r2,%r3;", [u32::MAX, 1], 1),
        ("setp.lt.u32 %p1|%p2,%r2,%r3;", [u32::MAX, 1], 2),
        ("setp.ge.s32 %p1|%p2,%r2,-1;", [u32::MAX, 1], 1),
        ("setp.le.u32 %p1|%p2,%r2,%r3;", [1, 1], 1),
        ("setp.lt.f32 %p1|%p2,%f2,%f3;", [nan, one], 2),
        ("setp.ltu.f32 %p1|%p2,%f2,%f3;", [nan, one], 1),
        ("setp.gtu.f32 %p1|%p2,%f2,%f3;", [one, two], 2),
        ("setp.geu.f32 %p1|%p2,%f2,%f3;", [two, two], 1),
        ("setp.leu.f32 %p1|%p2,%f2,%f3;", [two, one], 2),
        ("setp.ne.f32 %p1|%p2,%f2,%f3;", [nan, nan], 2),
        ("setp.neu.f32 %p1|%p2,%f2,%f3;", [nan, nan], 1),
        ("setp.nan.f32 %p1|%p2,%f2,%f3;", [nan, 0], 1),
        ("setp.num.f32 %p1|%p2,%f2,%f3;", [nan, 0], 2),
        ("setp.equ.f32 %p1|%p2,%f2,%f3;", [nan, one], 1),
        ("setp.eq.f32 %p1|%p2,%f2,0f80000000;", [0, 0], 1),
        (
            "mov.pred %p3,-1; setp.eq.and.s32 %p1|%p2,%r2,%r3,%p3;",
            [4, 4],
            1,
        ),
        (
            "mov.pred %p3,-1; setp.eq.and.s32 %p1|%p2,%r2,%r3,!%p3;",
            [4, 4],
            0,
        ),
        (
            "mov.pred %p3,-1; setp.eq.or.s32 %p1|%p2,%r2,%r3,%p3;",
            [4, 5],
            3,
        ),
        (
            "mov.pred %p3,-1; setp.eq.xor.s32 %p1|%p2,%r2,%r3,%p3;",
            [4, 4],
            2,
        ),
    ] {
        assert_eq!(
            calculate(&select(setp), &operands),
            expected,
            "{setp} of {operands:x?}"
        );
    }
    let guarded =
        "setp.eq.s32 %p1,%r2,1; mov.u32 %r1,7; @%p1 mov.u32 %r1,8; @!%p1 add.s32 %r1,%r1,%r2;";
    assert_eq!(calculate(guarded, &[1]), 8);
    assert_eq!(calculate(guarded, &[2]), 9);
}

#[test]
fn lanes_exchange_values() {
    let shuffle = |shuffle: &str| {
        let statements = format!(
            "add.s32 %r1,%r0,100;\n{shuffle}\nselp.b32 %r3,1000,0,%p1;\nadd.s32 %r2,%r2,%r3;\n\
             mul.wide.u32 %rd1,%r0,4;\nadd.s64 %rd1,%rd1,%rd0;\nst.global.u32 [%rd1],%r2;"
        );
        run(&statements, 32, [0; WORDS]).unwrap()[..32].to_vec()
    };
    let lanes = |of: fn(u32) -> u32| (0..32).map(of).collect::<Vec<_>>();
    assert_eq!(
        shuffle("shfl.sync.bfly.b32 %r2|%p1,%r1,5,31,-1;"),
        lanes(|lane| 1100 + (lane ^ 5))
    );
    assert_eq!(
        shuffle("shfl.sync.up.b32 %r2|%p1,%r1,3,0,-1;"),
        lanes(|lane| if lane < 3 {
            100 + lane
        } else {
            1100 + lane - 3
        })
    );
    assert_eq!(
        shuffle("shfl.sync.down.b32 %r2|%p1,%r1,3,31,-1;"),
        lanes(|lane| if lane > 28 {
            100 + lane
        } else {
            1100 + lane + 3
        })
    );
    // Segments of 8 lanes.
    assert_eq!(
        shuffle("shfl.sync.idx.b32 %r2|%p1,%r1,2,6175,-1;"),
        lanes(|lane| 1100 + lane / 8 * 8 + 2)
    );
    assert_eq!(
        shuffle("setp.gt.u32 %p2,%r0,29;\nvote.sync.ballot.b32 %r2,%p2,-1;\nmov.pred %p1,0;"),
        [3 << 30; 32]
    );
}

#[test]
fn functions_return_to_their_callers() {
    let function = ".func (.param .b32 result) double(\n.param .b32 number\n)\n{\n.reg .b32 %r<3>;\n\
                    ld.param.u32 %r1,[number];\nadd.s32 %r2,%r1,%r1;\nst.param.b32 [result+0],%r2;\nret;\n}\n";
    let call = "{\n.param .b32 param0;\nst.param.b32 [param0+0],%r1;\n.param .b32 retval0;\n\
                call.uni (retval0),\ndouble,\n(\nparam0\n);\nld.param.b32 %r1,[retval0+0];\n}\n";
    let kernel = module(&format!(
        "mov.u32 %r1,5;\n{call}{call}st.global.u32 [%rd0],%r1;"
    ));
    let (header, kernel) = kernel.split_once(".visible").unwrap();
    let device = PtxDevice::with_module(
        1,
        "test.ptx",
        &format!("{header}{function}.visible{kernel}"),
    )
    .unwrap();
    let mut bytes = [0; 4];
    let address = device.allocate(4).unwrap();
    // SAFETY: the kernel stores one word.
    unsafe {
        let launch = Launch {
            kernel: "test",
            grid: [1; 3],
            threads: 1,
            shared_bytes: 0,
            arguments: &address.to_le_bytes(),
        };
        device.launch(&launch).unwrap();
        device.read(address, &mut bytes).unwrap();
        device.free(address, 4);
    }
    assert_eq!(u32::from_le_bytes(bytes), 20);
}

#[test]
fn asynchronous_copies_land_when_they_are_waited_for() {
    let copy = |wait: &str| {
        let statements = format!(
            "mov.u64 %rd1,memory;\ncvt.u32.u64 %r1,%rd1;\nadd.s64 %rd2,%rd0,16;\n\
             cp.async.cg.shared.global [%r1],[%rd0],16;\ncp.async.commit_group;\nadd.s32 %r2,%r1,16;\n\
             cp.async.cg.shared.global [%r2],[%rd2],16;\ncp.async.commit_group;\n{wait}\n\
             cvta.shared.u64 %rd3,%rd1;\nld.u32 %r3,[%rd3+4];\nld.shared.u32 %r4,[memory+20];\n\
             st.global.v2.u32 [%rd0],{{%r3,%r4}};"
        );
        let found = run(&statements, 1, std::array::from_fn(|word| word as u32)).unwrap();
        [found[0], found[1]]
    };
    assert_eq!(copy("cp.async.wait_all;"), [1, 5]);
    assert_eq!(copy("cp.async.wait_group 0;"), [1, 5]);
    assert_eq!(copy("cp.async.wait_group 1;"), [1, u32::MAX]);
    assert_eq!(copy(""), [u32::MAX; 2]);
}

#[test]
fn mistakes_are_errors_that_name_their_place() {
    let place = "line 18 of the PTX: block (0, 0, 0) thread";
    for (statements, threads, expected) in [
        ("\nld.global.u32 %r1,[%rd0+256];", 1, "0 loads 4 bytes at"),
        ("\nst.global.u32 [%rd0+-4],%r1;", 1, "0 stores 4 bytes at"),
        ("\nld.global.u32 %r1,[%rd0+2];", 1, "not aligned to 4 bytes"),
        (
            "\nld.global.v2.u32 {%r1,%r2},[%rd0+4];",
            1,
            "not aligned to 8 bytes",
        ),
        (
            "\nld.shared.u32 %r1,[memory+256];",
            1,
            "outside of Shared memory",
        ),
        (
            "\nld.shared.u32 %r1,[memory+-4];",
            1,
            "outside of Shared memory",
        ),
        (
            "\nld.param.u32 %r1,[buffer+8];",
            1,
            "outside of Parameter memory",
        ),
        (
            "mov.u64 %rd1,memory;\nld.global.u32 %r1,[%rd1];",
            1,
            "outside of Global memory",
        ),
        ("\ntrap;", 1, "0 meets a trap"),
        ("mov.u32 %r1,0;\ndiv.u32 %r2,%r0,%r1;", 1, "0 divides by 0"),
        (
            "setp.lt.u32 %p1,%r0,5; @%p1 bra THERE;\nbar.sync 0; bra END;\nTHERE:\nbar.sync 0;\nEND:",
            64,
            "5 waits at another barrier than thread 0",
        ),
        (
            "setp.eq.u32 %p1,%r0,0; @%p1 bra END;\nshfl.sync.bfly.b32 %r1|%p2,%r0,1,31,-1;\nEND:\nbar.sync 0;",
            32,
            "1 waits for lanes of its warp",
        ),
        (
            "\nshfl.sync.idx.b32 %r1|%p2,%r0,9,31,255;",
            8,
            "shuffles from lane 9",
        ),
        ("\nbar.warp.sync 1;", 2, "1 is not in the mask"),
        (
            "sub.s32 %r1,3,%r0;\nvote.sync.ballot.b32 %r2,%p1,%r1;",
            2,
            "0 has another mask",
        ),
    ] {
        // The place of a divergent barrier is that of the second one.
        let error = run(statements, threads, [0; WORDS]).expect_err(statements);
        assert!(error.contains(expected), "{statements}: {error}");
        assert!(error.starts_with(place), "{statements}: {error}");
    }
}

#[test]
fn unknown_ptx_is_an_error_that_names_its_place() {
    for (statement, reason) in [
        ("sin.approx.f32 %f1,%f2;", "unknown opcode `sin.approx.f32`"),
        // An assembler may fuse operations without a rounding mode.
        ("add.f32 %f1,%f2,%f3;", "unknown opcode `add.f32`"),
        ("ld.local.u32 %r1,[%rd0];", "unknown modifier `local`"),
        ("add.s32 %r1,%r2;", "expected 3 operands, found 2"),
        ("add.s32 %r1,%rd2,%r3;", "`%rd2` has 64 bits, not 32"),
        ("add.s32 %r1,%r2,%r20;", "unknown register `%r20`"),
        ("mov.u32 %r1,%clock;", "unknown register `%clock`"),
        ("bar.sync 1;", "unknown opcode `bar.sync`"),
        ("setp.some.f32 %p1,%f1,%f2;", "unknown comparison `some`"),
    ] {
        let error = PtxDevice::with_module(1, "test.ptx", &module(statement)).unwrap_err();
        let bare = statement.trim_end_matches(';');
        assert_eq!(
            error.to_string(),
            format!("test.ptx, line 17: {reason}: `{bare}`")
        );
    }
}
