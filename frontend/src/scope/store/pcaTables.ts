/** Names of tables of coordinates in a sample: exact ones that were sent with the basis, and those of steps by the basis's version. */
export const FITTED = "pca.fitted";
export const pcaTable = (version: number | undefined): string => `pca.${version ?? "none"}`;
