// Command virtual-sigstore signs an image's digest as identities would by Sigstore, well and in many wrong ways, and prints
// the signatures with the trusted root that goes with them. Nothing of it is known to anybody else.
//
// The logs, time stamps and authorities are those of sigstore-go's testing package. Its leaf certificates carry no promise of
// a log of certificates, which verifiers demand; so leaves are issued here, by an authority and a log made for that.
package main

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/sigstore/sigstore-go/pkg/root"
	"github.com/sigstore/sigstore-go/pkg/testing/ca"
	"github.com/sigstore/sigstore-go/pkg/tlog"
)

const (
	version   = "1.2.1"
	bundle    = "application/vnd.dev.sigstore.bundle.v0.3+json"
	inToto    = "application/vnd.in-toto+json"
	predicate = "https://sigstore.dev/cosign/sign/v1"
	alice     = "alice@example.com"
	accounts  = "https://accounts.example.com"
	workflow  = "https://github.com/acme/kernels/.github/workflows/build.yml@refs/heads/main"
	actions   = "https://token.actions.githubusercontent.com"
)

type object = map[string]any

// sigstore is one installation: who issues certificates, and the logs that see them and signatures.
type sigstore struct {
	*ca.VirtualSigstore
	root, issuer *x509.Certificate
	issuerKey    *ecdsa.PrivateKey
	certificates *ecdsa.PrivateKey // of the log of certificates
	tiles        *ecdsa.PrivateKey // of the second log, a Rekor v2
	start        time.Time
}

// want says what a signature shall be like.
type want struct {
	identity, issuer string
	digests          []string
	payloadType      string
	predicate        string
	tiles            bool          // in the Rekor v2 log, which gives no time
	untimed          bool          // without a time stamp
	unseen           bool          // no log of certificates has seen the leaf
	server           bool          // the leaf is for servers, not for code
	after            time.Duration // when the log saw the signature, after it was made
	entries          int
}

func must[T any](value T, err error) T {
	check(err)
	return value
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "virtual-sigstore:", err)
		os.Exit(1)
	}
}

func newKey() *ecdsa.PrivateKey { return must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader)) }

func base(raw []byte) string { return base64.StdEncoding.EncodeToString(raw) }

func hashed(raw []byte) []byte { sum := sha256.Sum256(raw); return sum[:] }

func keyID(key *ecdsa.PrivateKey) []byte {
	return hashed(must(x509.MarshalPKIXPublicKey(key.Public())))
}

func signed(key *ecdsa.PrivateKey, data []byte) []byte {
	return must(ecdsa.SignASN1(rand.Reader, key, hashed(data)))
}

func newSigstore() *sigstore {
	rootCertificate, rootKey, err := ca.GenerateRootCa()
	check(err)
	issuer, issuerKey, err := ca.GenerateFulcioIntermediate(rootCertificate, rootKey)
	check(err)
	return &sigstore{
		VirtualSigstore: must(ca.NewVirtualSigstore()),
		root:            rootCertificate,
		issuer:          issuer,
		issuerKey:       issuerKey,
		certificates:    newKey(),
		tiles:           newKey(),
		start:           time.Now().Add(-time.Minute),
	}
}

func (s *sigstore) trustedRoot() json.RawMessage {
	from, to := s.start.Add(-time.Hour), s.start.Add(2*time.Hour)
	log := func(host string, key crypto.PublicKey) *root.TransparencyLog {
		return &root.TransparencyLog{
			BaseURL: "https://" + host, ID: hashed(must(x509.MarshalPKIXPublicKey(key))),
			ValidityPeriodStart: from, ValidityPeriodEnd: to,
			HashFunc: crypto.SHA256, SignatureHashFunc: crypto.SHA256, PublicKey: key,
		}
	}
	logs := map[string]*root.TransparencyLog{"tiles": log("rekor2.localhost", s.tiles.Public())}
	for id, each := range s.RekorLogs() {
		logs[id] = log("rekor.localhost", each.PublicKey)
	}
	made := must(root.NewTrustedRoot(
		root.TrustedRootMediaType01,
		[]root.CertificateAuthority{&root.FulcioCertificateAuthority{
			Root: s.root, Intermediates: []*x509.Certificate{s.issuer}, URI: "https://fulcio.localhost",
			ValidityPeriodStart: from, ValidityPeriodEnd: to,
		}},
		map[string]*root.TransparencyLog{"certificates": log("ctfe.localhost", s.certificates.Public())},
		s.TimestampingAuthorities(),
		logs,
	))
	return must(made.MarshalJSON())
}

// leaf is a certificate for ten minutes around now, as Fulcio gives them.
func (s *sigstore) leaf(w want) (*x509.Certificate, *ecdsa.PrivateKey) {
	key := newKey()
	template := &x509.Certificate{
		SerialNumber: must(rand.Int(rand.Reader, big.NewInt(1<<62))),
		NotBefore:    s.start,
		NotAfter:     s.start.Add(10 * time.Minute),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageCodeSigning},
		ExtraExtensions: []pkix.Extension{
			{Id: asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 57264, 1, 1}, Value: []byte(w.issuer)},
			{Id: asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 57264, 1, 8}, Value: must(asn1.MarshalWithParams(w.issuer, "utf8"))},
		},
	}
	if w.server {
		template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	}
	if strings.HasPrefix(w.identity, "https://") {
		template.URIs = []*url.URL{must(url.Parse(w.identity))}
	} else {
		template.EmailAddresses = []string{w.identity}
	}
	if !w.unseen {
		before := must(x509.ParseCertificate(must(x509.CreateCertificate(rand.Reader, template, s.issuer, key.Public(), s.issuerKey))))
		template.ExtraExtensions = append(template.ExtraExtensions, s.promise(before.RawTBSCertificate))
	}
	der := must(x509.CreateCertificate(rand.Reader, template, s.issuer, key.Public(), s.issuerKey))
	return must(x509.ParseCertificate(der)), key
}

// promise is the extension with the log's signature over the rest of a certificate (RFC 6962, 3.2 and 3.3).
func (s *sigstore) promise(body []byte) pkix.Extension {
	at := make([]byte, 8)
	binary.BigEndian.PutUint64(at, uint64(s.start.UnixMilli()))
	length := make([]byte, 4)
	binary.BigEndian.PutUint32(length, uint32(len(body)))
	message := append([]byte{0, 0}, at...)
	message = append(append(message, 0, 1), hashed(s.issuer.RawSubjectPublicKeyInfo)...)
	message = append(append(append(message, length[1:]...), body...), 0, 0)
	signature := signed(s.certificates, message)
	made := append(append([]byte{0}, keyID(s.certificates)...), at...)
	made = append(append(made, 0, 0, 4, 3, 0, byte(len(signature))), signature...)
	list := append([]byte{0, byte(len(made) + 2), 0, byte(len(made))}, made...)
	return pkix.Extension{Id: asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 11129, 2, 4, 2}, Value: must(asn1.Marshal(list))}
}

func (s *sigstore) bundle(w want) object {
	leaf, key := s.leaf(w)
	subjects := []object{}
	for _, digest := range w.digests {
		subjects = append(subjects, object{"digest": object{"sha256": strings.TrimPrefix(digest, "sha256:")}})
	}
	payload := must(json.Marshal(object{
		"_type": "https://in-toto.io/Statement/v1", "subject": subjects, "predicateType": w.predicate, "predicate": object{},
	}))
	pae := []byte(fmt.Sprintf("DSSEv1 %d %s %d %s", len(w.payloadType), w.payloadType, len(payload), payload))
	signature := signed(key, pae)
	entry := s.entry(w, leaf, payload, pae, signature)
	entries := []object{}
	for range w.entries {
		entries = append(entries, entry)
	}
	material := object{"certificate": object{"rawBytes": base(leaf.Raw)}, "tlogEntries": entries}
	if !w.untimed {
		stamp := object{"signedTimestamp": base(must(s.TimestampResponse(signature)))}
		material["timestampVerificationData"] = object{"rfc3161Timestamps": []object{stamp}}
	}
	return object{
		"mediaType": bundle, "verificationMaterial": material,
		"dsseEnvelope": object{
			"payload": base(payload), "payloadType": w.payloadType, "signatures": []object{{"sig": base(signature)}},
		},
	}
}

// entry is what a log says of a signature: a Rekor v1 promises and proves, a Rekor v2 proves.
func (s *sigstore) entry(w want, leaf *x509.Certificate, payload, pae, signature []byte) object {
	if w.tiles {
		body := must(json.Marshal(object{"apiVersion": "0.0.2", "kind": "hashedrekord", "spec": object{"hashedRekordV002": object{
			"data": object{"algorithm": "SHA2_256", "digest": base(hashed(pae))},
			"signature": object{"content": base(signature), "verifier": object{
				"keyDetails": "PKIX_ECDSA_P256_SHA_256", "x509Certificate": object{"rawBytes": base(leaf.Raw)},
			}},
		}}}))
		leafHash := hashed(append([]byte{0}, body...))
		note := fmt.Sprintf("rekor2.localhost\n1\n%s\n", base(leafHash))
		id := keyID(s.tiles)
		line := base(append(append([]byte{}, id[:4]...), signed(s.tiles, []byte(note))...))
		return object{
			"logIndex": "0", "logId": object{"keyId": base(id)},
			"kindVersion":       object{"kind": "hashedrekord", "version": "0.0.2"},
			"canonicalizedBody": base(body),
			"inclusionProof": object{
				"logIndex": "0", "treeSize": "1", "rootHash": base(leafHash), "hashes": []string{},
				"checkpoint": object{"envelope": note + "\n— rekor2.localhost " + line + "\n"},
			},
		}
	}
	envelope := must(json.Marshal(object{
		"payload": base(payload), "payloadType": w.payloadType, "signatures": []object{{"sig": base(signature)}},
	}))
	body := must(json.Marshal(object{"apiVersion": "0.0.1", "kind": "dsse", "spec": object{
		"envelopeHash": object{"algorithm": "sha256", "value": hex.EncodeToString(hashed(envelope))},
		"payloadHash":  object{"algorithm": "sha256", "value": hex.EncodeToString(hashed(payload))},
		"signatures":   []object{{"signature": base(signature), "verifier": base(pemOf(leaf))}},
	}}))
	proof := must(s.GetInclusionProof(body))
	at := time.Now().Add(w.after).Unix()
	id := must(hex.DecodeString(must(s.RekorLogID())))
	return object{
		"logIndex": "0", "logId": object{"keyId": base(id)},
		"kindVersion":       object{"kind": "dsse", "version": "0.0.1"},
		"integratedTime":    strconv.FormatInt(at, 10),
		"inclusionPromise":  object{"signedEntryTimestamp": base(s.promised(body, at))},
		"canonicalizedBody": base(body),
		"inclusionProof": object{
			"logIndex": "0", "treeSize": "1", "rootHash": base(must(hex.DecodeString(*proof.RootHash))), "hashes": []string{},
			"checkpoint": object{"envelope": *proof.Checkpoint},
		},
	}
}

func (s *sigstore) promised(body []byte, at int64) []byte {
	return must(s.RekorSignPayload(tlog.RekorPayload{
		Body: base(body), IntegratedTime: at, LogIndex: 0, LogID: must(s.RekorLogID()),
	}))
}

// legacy is a layer behind a .sig tag: what was signed, and its annotations.
func (s *sigstore) legacy(w want) object {
	leaf, key := s.leaf(w)
	payload := must(json.Marshal(object{"critical": object{
		"identity": object{"docker-reference": "registry.example/signed/elsewhere"},
		"image":    object{"docker-manifest-digest": w.digests[0]},
		"type":     "cosign container image signature",
	}, "optional": nil}))
	signature := signed(key, payload)
	body := must(json.Marshal(object{"apiVersion": "0.0.1", "kind": "hashedrekord", "spec": object{
		"data":      object{"hash": object{"algorithm": "sha256", "value": hex.EncodeToString(hashed(payload))}},
		"signature": object{"content": base(signature), "publicKey": object{"content": base(pemOf(leaf))}},
	}}))
	at := time.Now().Add(w.after).Unix()
	said := must(json.Marshal(object{
		"SignedEntryTimestamp": base(s.promised(body, at)),
		"Payload":              object{"body": base(body), "integratedTime": at, "logIndex": 0, "logID": must(s.RekorLogID())},
	}))
	return object{"payload": base(payload), "annotations": object{
		"dev.cosignproject.cosign/signature": base(signature),
		"dev.sigstore.cosign/certificate":    string(pemOf(leaf)),
		"dev.sigstore.cosign/chain":          string(pemOf(s.issuer)) + string(pemOf(s.root)),
		"dev.sigstore.cosign/bundle":         string(said),
	}}
}

func pemOf(certificate *x509.Certificate) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate.Raw})
}

func main() {
	if len(os.Args) != 2 {
		check(fmt.Errorf("usage: virtual-sigstore sha256:DIGEST"))
	}
	if os.Args[1] == "--version" {
		fmt.Println("virtual-sigstore", version)
		return
	}
	digest := os.Args[1]
	other := "sha256:" + strings.Repeat("0123456789abcdef", 4)
	s, stranger := newSigstore(), newSigstore()
	with := func(change func(*want)) want {
		w := want{
			identity: alice, issuer: accounts, digests: []string{digest}, payloadType: inToto, predicate: predicate, entries: 1,
		}
		change(&w)
		return w
	}
	good := with(func(*want) {})
	expired := with(func(w *want) { w.after, w.untimed = time.Hour, true })
	bundles := object{
		"good":          s.bundle(good),
		"tiles":         s.bundle(with(func(w *want) { w.tiles = true })),
		"workflow":      s.bundle(with(func(w *want) { w.identity, w.issuer, w.untimed = workflow, actions, true })),
		"look-alike":    s.bundle(with(func(w *want) { w.identity = alice + ".attacker.org" })),
		"other-issuer":  s.bundle(with(func(w *want) { w.issuer = accounts + ".attacker.org" })),
		"slow-name":     s.bundle(with(func(w *want) { w.identity = strings.Repeat("a", 60) + "!@example.com" })),
		"other-image":   s.bundle(with(func(w *want) { w.digests = []string{other} })),
		"subjects":      s.bundle(with(func(w *want) { w.digests = []string{other, digest} })),
		"payload-type":  s.bundle(with(func(w *want) { w.payloadType = "application/json" })),
		"attestation":   s.bundle(with(func(w *want) { w.predicate = "https://slsa.dev/provenance/v1" })),
		"expired":       s.bundle(expired),
		"untimed-tiles": s.bundle(with(func(w *want) { w.tiles, w.untimed = true, true })),
		"unseen":        s.bundle(with(func(w *want) { w.unseen = true })),
		"server":        s.bundle(with(func(w *want) { w.server = true })),
		"two-entries":   s.bundle(with(func(w *want) { w.entries = 2 })),
		"no-entry":      s.bundle(with(func(w *want) { w.entries = 0 })),
		"stranger":      stranger.bundle(good),
	}
	legacy := object{
		"good":        s.legacy(good),
		"expired":     s.legacy(expired),
		"look-alike":  s.legacy(with(func(w *want) { w.identity = alice + ".attacker.org" })),
		"other-image": s.legacy(with(func(w *want) { w.digests = []string{other} })),
		"unseen":      s.legacy(with(func(w *want) { w.unseen = true })),
		"server":      s.legacy(with(func(w *want) { w.server = true })),
		"stranger":    stranger.legacy(good),
	}
	made := object{"digest": digest, "trustedRoot": s.trustedRoot(), "bundles": bundles, "legacy": legacy}
	check(json.NewEncoder(os.Stdout).Encode(made))
}
