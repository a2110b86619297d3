package follow

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
)

// encoded returns a list of metadata as the API server sends it.
func encoded(t testing.TB, objects ...metav1.ObjectMeta) []byte {
	t.Helper()
	list := &metav1.PartialObjectMetadataList{ListMeta: metav1.ListMeta{ResourceVersion: "7", Continue: "more"}}
	for _, o := range objects {
		list.Items = append(list.Items, metav1.PartialObjectMetadata{TypeMeta: metav1.TypeMeta{Kind: "Sandbox"}, ObjectMeta: o})
	}
	raw := &bytes.Buffer{}
	require.NoError(t, protobuf.NewSerializer(nil, nil).Encode(list, raw))
	return raw.Bytes()
}

// readMetadata reads an answer that arrives in some way.
func readMetadata(source io.Reader) (objects []metav1.ObjectMeta, meta metav1.ListMeta, err error) {
	meta, err = splitMetadata(source, func(item []byte) error {
		sb, err := decodeMetadata(item)
		if err == nil {
			objects = append(objects, sb.ObjectMeta)
		}
		return err
	})
	return objects, meta, err
}

func TestSplitMetadata(t *testing.T) {
	managed := metav1.ManagedFieldsEntry{Manager: strings.Repeat("m", 300)}
	given := []metav1.ObjectMeta{
		{Namespace: "ns", Name: "a", UID: "u", Labels: map[string]string{"l": "1"}, Annotations: map[string]string{"x": strings.Repeat("y", 1000)}},
		{Name: "b", Finalizers: []string{"f"}, ManagedFields: []metav1.ManagedFieldsEntry{managed, managed}},
		{},
	}
	want := append([]metav1.ObjectMeta(nil), given...)
	want[1].ManagedFields = nil
	for name, test := range map[string]struct{ given, want []metav1.ObjectMeta }{"several": {given, want}, "none": {nil, nil}} {
		t.Run(name, func(t *testing.T) {
			raw := encoded(t, test.given...)
			for how, source := range map[string]io.Reader{"at once": bytes.NewReader(raw), "slowly": iotest.OneByteReader(bytes.NewReader(raw))} {
				objects, meta, err := readMetadata(source)
				require.NoError(t, err, how)
				require.Equal(t, test.want, objects, how)
				require.Equal(t, metav1.ListMeta{ResourceVersion: "7", Continue: "more"}, meta, how)
			}
		})
	}
}

// TestSplitMetadataCutOff: an answer that ends early is an error, wherever in the list it ends.
func TestSplitMetadataCutOff(t *testing.T) {
	raw := encoded(t, metav1.ObjectMeta{Name: "a"}, metav1.ObjectMeta{Name: "b"})
	rest := len("\x1a\x00\x22\x00") // contentEncoding and contentType follow the list, and say nothing
	require.Equal(t, "\x1a\x00\x22\x00", string(raw[len(raw)-rest:]))
	for n := range len(raw) - rest {
		_, _, err := readMetadata(bytes.NewReader(raw[:n]))
		require.Error(t, err, "after %d bytes", n)
	}
	_, _, err := readMetadata(io.MultiReader(bytes.NewReader(raw), iotest.ErrReader(io.ErrClosedPipe)))
	require.ErrorIs(t, err, io.ErrClosedPipe)
}

func TestSplitMetadataInvalid(t *testing.T) {
	for in, problem := range map[string]string{
		"":                          "unexpected EOF",
		`{"kind":"Status"}`:         "begins with",
		protobufPrefix:              "without metadata",
		protobufPrefix + "\x12\x00": "without metadata",
		protobufPrefix + "\x10\x00": "wire type",
		protobufPrefix + "\x12\x05\x0a\xff\xff\xff\xff\x7f": "a field of",
		protobufPrefix + "\x12\x02\x1a\x05aaaaa":            "ends after its message",
		protobufPrefix + "\x12\x03\x12\x01\xff":             "EOF",
	} {
		t.Run(fmt.Sprintf("%q", in), func(t *testing.T) {
			_, _, err := readMetadata(strings.NewReader(in))
			require.ErrorContains(t, err, problem)
		})
	}
}

// FuzzSplitMetadata: no answer makes the allocator panic.
func FuzzSplitMetadata(f *testing.F) {
	f.Add(encoded(f, metav1.ObjectMeta{Name: "a", ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "m"}}}))
	f.Fuzz(func(_ *testing.T, raw []byte) { _, _, _ = readMetadata(bytes.NewReader(raw)) })
}
