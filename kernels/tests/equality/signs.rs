//! Counts of agreeing signs.

use powerinfer_kernels::Isa;
use powerinfer_tensor::{SignMatrix, pack_signs};
use proptest::prelude::*;

use crate::noise::noise;

proptest! {
    #[test]
    fn sign_agreements_equal_those_of_the_values(
        columns in 1usize..300, rows in 0usize..9, seed in any::<u64>(),
    ) {
        let weights = noise(seed, rows * columns);
        let x = noise(seed ^ 1, columns);
        let bytes: Vec<u8> = weights
            .chunks(columns)
            .flat_map(pack_signs)
            .flat_map(u64::to_le_bytes)
            .collect();
        let signs = SignMatrix::new(&bytes, rows, columns).unwrap();
        prop_assert_eq!(signs.rows(), rows);
        let expected: Vec<u32> = weights
            .chunks(columns)
            .map(|row| {
                let agree = |(a, b): (&f32, &f32)| a.is_sign_negative() == b.is_sign_negative();
                row.iter().zip(&x).filter(|pair| agree(*pair)).count() as u32
            })
            .collect();
        for isa in Isa::available() {
            let mut found = vec![u32::MAX; rows];
            isa.sign_agreements(&signs, &pack_signs(&x).collect::<Vec<_>>(), &mut found);
            prop_assert_eq!(&found, &expected, "{}", isa);
        }
        prop_assert!(SignMatrix::new(&bytes, rows + 1, columns).is_err());
    }
}
