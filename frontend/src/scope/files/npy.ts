/** NumPy files (format 1.0) and CSV of numbers that the page has. */

const MAGIC = [0x93, 0x4e, 0x55, 0x4d, 0x50, 0x59, 1, 0];
const ALIGNMENT = 64;

/** A C-ordered float32 array as the bytes of a .npy file. */
export function npyBytes(values: Float32Array, shape: readonly number[]): Uint8Array<ArrayBuffer> {
  const sizes = shape.length === 1 ? `${shape[0]},` : shape.join(", ");
  const header = `{'descr': '<f4', 'fortran_order': False, 'shape': (${sizes}), }`;
  const start = MAGIC.length + 2;
  const total = Math.ceil((start + header.length + 1) / ALIGNMENT) * ALIGNMENT;
  const out = new Uint8Array(total + values.byteLength);
  out.set(MAGIC);
  new DataView(out.buffer).setUint16(MAGIC.length, total - start, true);
  const text = `${header.padEnd(total - start - 1, " ")}\n`;
  out.set(new TextEncoder().encode(text), start);
  out.set(new Uint8Array(values.buffer, values.byteOffset, values.byteLength), total);
  return out;
}

const cell = (value: string | number): string => {
  const text = String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};

/** Lines of comma-separated cells, as RFC 4180 has them. */
export const csvText = (rows: readonly (readonly (string | number)[])[]): string =>
  rows.map((row) => `${row.map(cell).join(",")}\r\n`).join("");
