/** Heat maps on WebGL2: one context for the page; each map is a texture of codes, one of masks and one of colours. */
import type { Cells, Region } from "./cells";
import type { HeatImage } from "./heatImage";
import type { Box } from "./surface";

const VERTEX = `#version 300 es
const vec2 corners[4] = vec2[4](vec2(0, 0), vec2(1, 0), vec2(0, 1), vec2(1, 1));
uniform vec4 view;
out vec2 cell;
void main() {
  vec2 corner = corners[gl_VertexID];
  cell = view.xy + corner * view.zw;
  gl_Position = vec4(corner.x * 2.0 - 1.0, 1.0 - corner.y * 2.0, 0.0, 1.0);
}`;

const FRAGMENT = `#version 300 es
precision highp float;
precision highp sampler2D;
uniform sampler2D codes;
uniform sampler2D masks;
uniform sampler2D colours;
in vec2 cell;
out vec4 colour;
void main() {
  ivec2 at = clamp(ivec2(floor(cell)), ivec2(0), textureSize(codes, 0) - 1);
  int code = int(texelFetch(codes, at, 0).r * 255.0 + 0.5);
  bool seen = texelFetch(masks, at, 0).r < 0.5 / 255.0;
  colour = seen ? vec4(texelFetch(colours, ivec2(code, 0), 0).rgb, 1.0) : vec4(0.0);
}`;

const SOFTWARE = /swiftshader|llvmpipe|softpipe|software|basic render/i;

interface Shared {
  readonly canvas: HTMLCanvasElement;
  readonly gl: WebGL2RenderingContext;
  readonly view: WebGLUniformLocation | null;
}

let shared: Shared | null | undefined;

function compile(gl: WebGL2RenderingContext): WebGLProgram | null {
  const program = gl.createProgram();
  for (const [kind, source] of [
    [gl.VERTEX_SHADER, VERTEX],
    [gl.FRAGMENT_SHADER, FRAGMENT],
  ] as const) {
    const shader = gl.createShader(kind);
    if (!shader) return null;
    gl.shaderSource(shader, source);
    gl.compileShader(shader);
    gl.attachShader(program, shader);
  }
  gl.linkProgram(program);
  return gl.getProgramParameter(program, gl.LINK_STATUS) === true ? program : null;
}

function open(): Shared | null {
  const canvas = document.createElement("canvas");
  const gl = canvas.getContext("webgl2", { preserveDrawingBuffer: true, premultipliedAlpha: true });
  const program = gl ? compile(gl) : null;
  if (!gl || !program) return null;
  gl.useProgram(program);
  ["codes", "masks", "colours"].forEach((name, index) =>
    gl.uniform1i(gl.getUniformLocation(program, name), index),
  );
  gl.pixelStorei(gl.UNPACK_ALIGNMENT, 1);
  return { canvas, gl, view: gl.getUniformLocation(program, "view") };
}

/** The context that all maps share; a lost one is replaced. */
function context(): Shared | null {
  if (shared === undefined || shared?.gl.isContextLost()) shared = open();
  return shared;
}

/** True if WebGL2 is available on a graphics card, not emulated in software. */
export function glIsFast(): boolean {
  const gl = context()?.gl;
  if (!gl) return false;
  const names = gl.getExtension("WEBGL_debug_renderer_info");
  return names !== null && !SOFTWARE.test(String(gl.getParameter(names.UNMASKED_RENDERER_WEBGL)));
}

function texture(gl: WebGL2RenderingContext, unit: number, known?: WebGLTexture): WebGLTexture {
  gl.activeTexture(gl.TEXTURE0 + unit);
  const made = known ?? gl.createTexture();
  gl.bindTexture(gl.TEXTURE_2D, made);
  if (known) return made;
  for (const filter of [gl.TEXTURE_MIN_FILTER, gl.TEXTURE_MAG_FILTER])
    gl.texParameteri(gl.TEXTURE_2D, filter, gl.NEAREST);
  return made;
}

export class GlHeat implements HeatImage {
  readonly kind = "webgl2";
  private readonly textures: readonly WebGLTexture[];
  private table: Uint8ClampedArray | undefined;
  private size = [0, 0];

  private constructor(private readonly at: Shared) {
    this.textures = [0, 1, 2].map((unit) => texture(at.gl, unit));
  }

  static create(): GlHeat | null {
    const found = context();
    return found ? new GlHeat(found) : null;
  }

  sync(cells: Cells, table: Uint8ClampedArray): void {
    const { gl } = this.at;
    this.bind();
    if (this.table !== table) {
      gl.activeTexture(gl.TEXTURE2);
      gl.texImage2D(gl.TEXTURE_2D, 0, gl.RGB8, 256, 1, 0, gl.RGB, gl.UNSIGNED_BYTE, new Uint8Array(table));
      this.table = table;
    }
    const changed = cells.takeDirty();
    const resized = this.size[0] !== cells.columns || this.size[1] !== cells.rows;
    [cells.values, cells.mask].forEach((bytes, unit) => {
      gl.activeTexture(gl.TEXTURE0 + unit);
      if (resized) this.allocate(cells, bytes);
      else if (changed) this.update(cells, changed, bytes);
    });
    this.size = [cells.columns, cells.rows];
  }

  paint(target: CanvasRenderingContext2D, view: Box, box: Box): void {
    const { gl, canvas } = this.at;
    const { a: ratio } = target.getTransform();
    const [width, height] = [Math.ceil(box.width * ratio), Math.ceil(box.height * ratio)];
    if (width < 1 || height < 1 || this.size[0] === 0) return;
    if (canvas.width < width || canvas.height < height)
      [canvas.width, canvas.height] = [Math.max(canvas.width, width), Math.max(canvas.height, height)];
    this.bind();
    gl.viewport(0, canvas.height - height, width, height);
    gl.uniform4f(this.at.view, view.x, view.y, view.width, view.height);
    gl.enable(gl.SCISSOR_TEST);
    gl.scissor(0, canvas.height - height, width, height);
    gl.drawArrays(gl.TRIANGLE_STRIP, 0, 4);
    target.imageSmoothingEnabled = false;
    target.drawImage(canvas, 0, 0, width, height, box.x, box.y, box.width, box.height);
  }

  dispose(): void {
    for (const made of this.textures) this.at.gl.deleteTexture(made);
  }

  private bind(): void {
    this.textures.forEach((made, unit) => texture(this.at.gl, unit, made));
  }

  private allocate({ columns, rows }: Cells, bytes: Uint8Array): void {
    const { gl } = this.at;
    gl.texImage2D(gl.TEXTURE_2D, 0, gl.R8, columns, rows, 0, gl.RED, gl.UNSIGNED_BYTE, bytes);
  }

  private update(cells: Cells, { row, rows }: Region, bytes: Uint8Array): void {
    const { gl } = this.at;
    const count = Math.min(rows, cells.rows - row);
    const part = bytes.subarray(row * cells.columns, (row + count) * cells.columns);
    gl.texSubImage2D(gl.TEXTURE_2D, 0, 0, row, cells.columns, count, gl.RED, gl.UNSIGNED_BYTE, part);
  }
}
