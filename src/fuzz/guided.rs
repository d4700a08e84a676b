//! libFuzzer in place of the loop of a target, under `--cfg flechette_fuzz` (`.ci/fuzz`).
//!
//! A strategy makes an input of random bytes. Here they are the bytes of libFuzzer, which keeps those that
//! reach new code and changes them further: it learns which changes of a valid input lead somewhere.

use std::cell::Cell;
use std::ffi::{CString, c_char, c_int};
use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;

use libfuzzer_sys as _;
use proptest::collection::vec;
use proptest::prelude::any;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// Random bytes after those of libFuzzer: a strategy that draws until a value fits would draw zeros for ever.
const REST: usize = 1 << 16;

/// The longest input of libFuzzer.
const LONGEST: usize = 4096;

#[allow(unsafe_code)]
unsafe extern "C" {
    /// Calls the function with inputs until its time is over, and then ends the process.
    fn LLVMFuzzerRunDriver(
        count: *mut c_int,
        arguments: *mut *mut *mut c_char,
        call: extern "C" fn(*const u8, usize) -> c_int,
    ) -> c_int;
}

thread_local! {
    /// The check that libFuzzer calls.
    static CHECK: Cell<*mut ()> = const { Cell::new(null_mut()) };
}

/// Checks inputs for some seconds, and then ends the process. The first input that fails is printed.
pub(super) fn run<S>(inputs: &S, seconds: f64, check: impl Fn(S::Value))
where
    S: Strategy,
    S::Value: Clone + Debug,
{
    let rest =
        vec(any::<u8>(), REST).new_tree(&mut TestRunner::deterministic()).expect("any bytes").current();
    let mut check = |bytes: &[u8]| {
        let bytes = [bytes, &rest].concat();
        let rng = TestRng::from_seed(RngAlgorithm::PassThrough, &bytes);
        let mut runner = TestRunner::new_with_rng(Config::default(), rng);
        let Ok(input) = inputs.new_tree(&mut runner) else { return };
        let input = input.current();
        let kept = input.clone();
        if catch_unwind(AssertUnwindSafe(|| check(input))).is_err() {
            eprintln!("this input fails: {kept:?}");
            std::process::abort();
        }
    };
    drive(&mut check, seconds);
}

fn drive<F: FnMut(&[u8])>(check: &mut F, seconds: f64) {
    let corpus = std::env::var("FLECHETTE_FUZZ_CORPUS").expect("FLECHETTE_FUZZ_CORPUS: a folder");
    let arguments = [
        "fuzz".to_owned(),
        corpus,
        format!("-max_total_time={}", seconds.ceil()),
        format!("-max_len={LONGEST}"),
        "-len_control=0".to_owned(),
        "-print_final_stats=1".to_owned(),
        "-verbosity=0".to_owned(),
    ];
    let arguments = arguments.map(|argument| CString::new(argument).expect("no zero byte"));
    let mut pointers: Vec<*mut c_char> = arguments.iter().map(|text| text.as_ptr().cast_mut()).collect();
    pointers.push(null_mut());
    let (mut count, mut pointers) = (arguments.len() as c_int, pointers.as_mut_ptr());
    CHECK.set((&raw mut *check).cast());
    // SAFETY: The arguments are `count` C strings, then null. They and the check live until the call ends.
    #[allow(unsafe_code)]
    let code = unsafe { LLVMFuzzerRunDriver(&raw mut count, &raw mut pointers, call::<F>) };
    panic!("libFuzzer ended with {code}");
}

extern "C" fn call<F: FnMut(&[u8])>(data: *const u8, length: usize) -> c_int {
    // SAFETY: libFuzzer passes `length` bytes that live until the call ends. For none, the pointer may be
    // null, and is not used.
    #[allow(unsafe_code)]
    let bytes = if length == 0 { &[] } else { unsafe { std::slice::from_raw_parts(data, length) } };
    // SAFETY: `drive` has set the pointer on this thread to its check, which is of type F and not in use:
    // libFuzzer calls this one input at a time, on the thread that `drive` waits on.
    #[allow(unsafe_code)]
    let check = unsafe { &mut *CHECK.get().cast::<F>() };
    check(bytes);
    0
}
