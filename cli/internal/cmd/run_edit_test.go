package cmd_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// edits sets an editor whose n-th call runs the n-th script on the file "$1". shown returns what the n-th call was shown.
func (b *harness) edits(t *testing.T, scripts ...string) (shown func(n int) string) {
	t.Helper()
	dir := t.TempDir()
	for i, script := range scripts {
		text := fmt.Sprintf("cp \"$1\" %s/shown-%d\n%s\n", dir, i, script)
		require.NoError(t, os.WriteFile(filepath.Join(dir, fmt.Sprintf("call-%d", i)), []byte(text), 0o600))
	}
	editor := filepath.Join(dir, "editor")
	script := fmt.Sprintf("n=$(cat %[1]s/n 2>/dev/null || echo 0)\necho $((n+1)) > %[1]s/n\n. %[1]s/call-$n\n", dir)
	require.NoError(t, os.WriteFile(editor, []byte(script), 0o600))
	b.env["EDITOR"] = "sh " + editor
	return func(n int) string {
		raw, err := os.ReadFile(filepath.Join(dir, fmt.Sprintf("shown-%d", n)))
		require.NoError(t, err)
		return string(raw)
	}
}

func TestRunEdit(t *testing.T) {
	w := newLiveAllocator(0)
	b := start(t, w.fake())
	b.env["FSB_POOL"] = "of-env"
	shown := b.edits(t, `sed -i -e 's/^  image:/  image: edited/' -e 's/^  # name: web/  name: edited/' -e 's/# exposedPorts/exposedPorts/' "$1"`)
	r := b.run(t, "run", "--edit", "-q", "--env", "A=b", "--", "true")
	require.Zero(t, r.code, r.err)
	require.Equal(t, "edited\n", r.out)
	got := w.creates[0]
	require.Equal(t, "edited", got.GetSpec().GetImage())
	require.Equal(t, []int32{8080}, got.GetSpec().GetPorts())
	require.Equal(t, "of-env", got.GetSpec().GetPool())
	require.Equal(t, []string{"true"}, got.GetSpec().GetCommand())
	require.Contains(t, shown(0), "# Flags and --filename have set these fields, and override this file:\n#   spec:\n#     command:\n")
	require.NotContains(t, shown(0), "of-env", "the edited pool overrides that of the environment")
}

// TestRunEditPrecedence checks that flags override the manifest, which overrides the edited one.
func TestRunEditPrecedence(t *testing.T) {
	w := newLiveAllocator(0)
	b := start(t, w.fake())
	file := filepath.Join(t.TempDir(), "sandbox.yaml")
	require.NoError(t, os.WriteFile(file, []byte(manifest), 0o600))
	shown := b.edits(t, `cat > "$1" <<EOF
apiVersion: fast-sandbox.io/v1alpha1
kind: Sandbox
metadata: {name: edited, labels: {a: edited, c: edited}}
spec: {image: edited, poolRef: edited, workingDir: /edited, exposedPorts: [1]}
EOF`)
	require.Zero(t, b.run(t, "run", "--edit", "-f", file, "--image", "flag").code)
	got := w.creates[0]
	require.Equal(t, "flag", got.GetSpec().GetImage())
	require.Equal(t, "declared", got.GetName())
	require.Equal(t, "ns", got.GetNamespace())
	require.Equal(t, "p", got.GetSpec().GetPool())
	require.Equal(t, "/edited", got.GetSpec().GetWorkingDir())
	require.Equal(t, []int32{80}, got.GetSpec().GetPorts())
	require.Equal(t, map[string]string{"a": "b", "c": "edited"}, got.GetLabels())
	require.Contains(t, shown(0), "#     image: flag\n")
}

func TestRunEditIsCanceled(t *testing.T) {
	for name, tc := range map[string]struct{ script, want string }{
		"unchanged":     {`true`, "edit canceled: no changes were made (EDIT_CANCELED)"},
		"only comments": {`echo "# more" >> "$1"`, "edit canceled: no changes were made (EDIT_CANCELED)"},
		"empty":         {`: > "$1"`, "edit canceled: the saved file was empty (EDIT_CANCELED)"},
	} {
		t.Run(name, func(t *testing.T) {
			b := start(t, &fake{}) // a call is an INTERNAL error with exit code 1
			b.edits(t, tc.script)
			r := b.run(t, "run", "--edit", "--image", "img")
			require.Equal(t, 130, r.code, r.err)
			require.Contains(t, r.err, tc.want)
			require.Empty(t, r.out)
		})
	}
}

// TestRunEditReopens shows errors of fsb-ctl and of the server in the editor until the sandbox is valid.
func TestRunEditReopens(t *testing.T) {
	w := newLiveAllocator(0)
	f := w.fake()
	f.create = func(ctx context.Context, in *sandboxv1.CreateSandboxRequest) (*sandboxv1.CreateSandboxResponse, error) {
		if in.GetSpec().GetImage() == "two words" {
			return nil, fault.Field("spec.image", "invalid image reference")
		}
		return w.create(ctx, in)
	}
	b := start(t, f)
	shown := b.edits(t,
		`sed -i 's/^  image:/  imagee: x/' "$1"`,
		`sed -i 's/^  imagee: x/  image: two words/' "$1"`,
		`sed -i 's/two words/one/' "$1"`)
	r := b.run(t, "run", "--edit", "-q")
	require.Zero(t, r.code, r.err)
	require.Len(t, w.creates, 1)
	require.Equal(t, "one", w.creates[0].GetSpec().GetImage())
	require.Regexp(t, `^# error: reading the edited manifest: .*unknown field "imagee"`, shown(1))
	require.Regexp(t, `^# error: spec.image: invalid image reference\n`, shown(2))
	require.NotContains(t, shown(2), "unknown field")

	t.Run("not corrected", func(t *testing.T) {
		b.edits(t, `sed -i 's/^  image:/  imagee: x/' "$1"`, `true`)
		r := b.run(t, "run", "--edit")
		require.Equal(t, 2, r.code, r.err)
		require.Contains(t, r.err, "unknown field")
	})
	t.Run("an error that editing cannot correct", func(t *testing.T) {
		f.create = func(context.Context, *sandboxv1.CreateSandboxRequest) (*sandboxv1.CreateSandboxResponse, error) {
			return nil, fault.New(errdefs.ErrAlreadyExists, fault.SandboxExists, "taken")
		}
		b.edits(t, `sed -i 's/^  image:/  image: x/' "$1"`)
		require.Equal(t, 4, b.run(t, "run", "--edit").code)
	})
	t.Run("editor that does not exist", func(t *testing.T) {
		b.env["EDITOR"] = "/nonexistent/editor"
		require.Equal(t, 1, b.run(t, "run", "--edit").code)
	})
}
